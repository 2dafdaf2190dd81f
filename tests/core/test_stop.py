"""When a request stops, judged on its newest token."""

import pytest

from tests.core.harness import EOS, make_request
from vllm_clone.core.request import Request
from vllm_clone.core.sched.stop import check_stop
from vllm_clone.messages import FinishReason
from vllm_clone.sampling_params import RepetitionDetectionParams


def feed(request: Request, *tokens: int, max_model_len: int = 100) -> int:
    """Append tokens until one stops the request; how many were taken."""
    for count, token in enumerate(tokens, 1):
        request.append_token(token)
        if check_stop(request, max_model_len):
            return count
    return len(tokens)


def test_eos_stops_without_a_stop_reason() -> None:
    request = make_request(3, max_tokens=10, eos_token_id=EOS)
    assert feed(request, 5, EOS, 6) == 2
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)
    assert request.output_token_ids == [5, EOS]


def test_ignore_eos_goes_on() -> None:
    request = make_request(3, max_tokens=10, eos_token_id=EOS, ignore_eos=True)
    assert feed(request, EOS, 5) == 2
    assert not request.is_finished


def test_a_stop_id_is_the_stop_reason() -> None:
    request = make_request(3, max_tokens=10, eos_token_id=EOS, stop_token_ids=[7, 8])
    feed(request, 5, 8)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 8)


def test_eos_on_the_last_permitted_token_is_a_stop() -> None:
    request = make_request(3, max_tokens=1, eos_token_id=EOS)
    feed(request, EOS)
    assert request.finish_reason is FinishReason.STOP


def test_max_tokens_is_length() -> None:
    request = make_request(3, max_tokens=2)
    assert feed(request, 5, 6, 7) == 2
    assert (request.finish_reason, request.stop_reason) == (FinishReason.LENGTH, None)


def test_the_model_length_is_length() -> None:
    request = make_request(9, max_tokens=100)
    assert feed(request, 5, 6, max_model_len=10) == 1
    assert request.finish_reason is FinishReason.LENGTH


def test_token_stops_do_not_look_at_min_tokens() -> None:
    request = make_request(3, max_tokens=10, min_tokens=5, eos_token_id=EOS)
    assert feed(request, EOS) == 1
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("tokens", "stops"), [([7, 8, 7, 8, 7, 8], True), ([7, 8, 7, 8, 7], False), ([3, 7, 7, 7], True), ([7, 7], False)]
)
def test_repetition(tokens: list[int], stops: bool) -> None:
    detection = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    request = make_request(3, max_tokens=20, repetition_detection=detection)
    feed(request, *tokens)
    assert request.is_finished is stops
    if stops:
        assert (request.finish_reason, request.stop_reason) == (FinishReason.REPETITION, "repetition_detected")


def test_repetition_of_small_patterns_may_be_allowed() -> None:
    detection = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=2, min_count=2)
    request = make_request(3, max_tokens=20, repetition_detection=detection)
    assert feed(request, 7, 7, 7) == 3
    assert not request.is_finished
    feed(request, 7)
    assert request.finish_reason is FinishReason.REPETITION


def test_repetition_waits_for_min_tokens_and_ignores_the_prompt() -> None:
    detection = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    request = make_request([7, 7, 7], max_tokens=20, min_tokens=3, repetition_detection=detection)
    assert feed(request, 7, 7) == 2
    assert not request.is_finished
    feed(request, 7)
    assert request.finish_reason is FinishReason.REPETITION
