"""When a request stops, judged token by token."""

from vllm_clone.core.request import Request
from vllm_clone.messages import FinishReason
from vllm_clone.sampling_params import RepetitionDetectionParams


def check_stop(request: Request, max_model_len: int) -> bool:
    """Finish ``request`` if its newest token ends it.

    In this order: EOS, stop id, end of the grammar, length, repetition.

    ``min_tokens`` is not looked at for ids: the sampler masks them until it is reached.
    """
    token = request.all_token_ids[-1]
    if token == request.eos_token_id:
        request.finish(FinishReason.STOP)
    elif token in request.stop_token_ids:
        request.finish(FinishReason.STOP, token)
    elif request.grammar is not None and request.grammar.is_terminated:
        request.finish(FinishReason.STOP)  # the end of the text, with ignore_eos too
    elif request.num_tokens >= max_model_len or request.num_output_tokens >= request.max_tokens:
        request.finish(FinishReason.LENGTH)
    else:
        params = request.sampling_params
        detection = params.repetition_detection
        if (
            detection is None
            or not detection.max_pattern_size
            or request.num_output_tokens < params.min_tokens
            or not repeats(request.all_token_ids, request.num_prompt_tokens, detection)
        ):
            return False
        request.finish(FinishReason.REPETITION, "repetition_detected")
    return True


def repeats(tokens: list[int], start: int, detection: RepetitionDetectionParams) -> bool:
    """Whether ``tokens[start:]`` ends in ``min_count`` copies of one pattern of an allowed size."""
    available = len(tokens) - start
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        span = size * detection.min_count
        if span > available:
            return False
        tail = tokens[-span:]
        if all(tail[i] == tail[i - size] for i in range(size, span)):
            return True
    return False
