"""One request and its n sequences: independent for the engine, one output stream for the consumer."""

from collections.abc import Callable

from vllm_clone.engine.inputs import ProcessedRequest
from vllm_clone.engine.logprobs import TokenTexts, prompt_logprobs
from vllm_clone.engine.sequence import SequenceState
from vllm_clone.messages import EngineCoreOutput
from vllm_clone.metrics.stats import IterationStats
from vllm_clone.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from vllm_clone.sampling_params import RequestOutputKind
from vllm_clone.tokenizers.base import Tokenizer

Sink = Callable[[RequestOutput | Exception], None]
"""Where a request's outputs go; an exception is its last word."""


class RequestState:
    """A request in flight.

    Attributes:
        open: sequences that still run, by the engine's id.
    """

    def __init__(
        self,
        request: ProcessedRequest,
        sink: Sink,
        tokenizer: Tokenizer | None,
        texts: TokenTexts | None,
        stream_interval: int,
    ) -> None:
        self.request_id = request.request_id
        self.open: dict[str, SequenceState] = {}
        for index, core in enumerate(request.sequences):
            self.open[core.request_id] = SequenceState(core, index, tokenizer, texts, stream_interval)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._request = request
        self._sink = sink
        self._texts = texts if request.params.detokenize else None
        self._kind = request.params.output_kind
        self._final: list[CompletionOutput] = []
        """Ended sequences of a FINAL_ONLY request that waits for the others."""
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._max_generated = 0

    @property
    def is_finished(self) -> bool:
        return not self.open

    def take_prompt_logprobs(self, output: EngineCoreOutput, sequence: SequenceState) -> None:
        """Keep the prompt's scores from whichever sequence brings them first."""
        wanted = self._request.params.prompt_logprobs is not None
        if wanted and output.prefill_stats is not None and self._prompt_logprobs is None:
            ids = self._request.prompt_token_ids
            self._prompt_logprobs = prompt_logprobs(output.prompt_logprobs, ids, self._texts)

    def deliver(self, sequence: SequenceState) -> None:
        """Tell the consumer what is new about one sequence, if it is time."""
        if sequence.is_finished:
            self.open.pop(sequence.sequence_id, None)
            self._max_generated = max(self._max_generated, sequence.num_output_tokens)
        completion = sequence.emit()
        if completion is None:
            return
        completions = [completion]
        if self._kind is RequestOutputKind.FINAL_ONLY:
            self._final.append(completion)
            if self.open:
                return
            completions = sorted(self._final, key=lambda c: c.index)
        self._sink(
            RequestOutput(
                request_id=self.request_id,
                prompt=self._request.prompt,
                prompt_token_ids=self._request.prompt_token_ids,
                outputs=completions,
                finished=self.is_finished,
                prompt_logprobs=self._prompt_logprobs or None,
                num_cached_tokens=sequence.num_cached_tokens,
                num_created_cache_tokens=sequence.num_created_cache_tokens,
                times=sequence.times,
            )
        )
        if self._kind is RequestOutputKind.DELTA and self._prompt_logprobs:
            self._prompt_logprobs = []  # said once; [] marks it as said

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.open.clear()
        self._sink(error)

    def count(self, stats: IterationStats) -> None:
        """Once, when the last sequence has ended by itself."""
        stats.request_n.append(self._request.params.n)
        stats.request_max_generation_tokens.append(self._max_generated)
