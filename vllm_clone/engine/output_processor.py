"""From engine outputs to what consumers see. Knows every request in flight on this frontend."""

import time
from collections.abc import Sequence

from vllm_clone.engine.inputs import ProcessedRequest
from vllm_clone.engine.logprobs import TokenTexts
from vllm_clone.engine.parallel_sampling import RequestState, Sink
from vllm_clone.engine.sequence import SequenceState
from vllm_clone.errors import RequestError
from vllm_clone.logger import init_logger
from vllm_clone.messages import EngineCoreOutput, FinishReason
from vllm_clone.metrics.stats import IterationStats
from vllm_clone.tokenizers.base import Tokenizer

logger = init_logger(__name__)


class OutputProcessor:
    """Routes each engine output to its request; one request's trouble stays its own.

    Args:
        tokenizer: None when no text is produced.
        stream_interval: tokens per emission; a request's own value can only raise it.
    """

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._stream_interval = stream_interval
        self._by_sequence: dict[str, RequestState] = {}
        self._by_request: dict[str, list[RequestState]] = {}
        self._awaiting_first: dict[str, int] = {}
        """Sequences without a first token → their prompt length."""

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return sum(map(len, self._by_request.values()))

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens of sequences that have no first token yet."""
        return sum(self._awaiting_first.values())

    def add(self, request: ProcessedRequest, sink: Sink) -> RequestState:
        """Register a request; to be called before the engine can answer."""
        state = RequestState(request, sink, self._tokenizer, self._texts, self._stream_interval)
        for sequence_id in state.open:
            self._by_sequence[sequence_id] = state
            self._awaiting_first[sequence_id] = state.num_prompt_tokens
        self._by_request.setdefault(state.request_id, []).append(state)
        return state

    def process(self, outputs: Sequence[EngineCoreOutput], timestamp: float, stats: IterationStats) -> list[str]:
        """Take in engine outputs and hand results to their consumers.

        Args:
            timestamp: engine monotonic clock of the batch, seconds.

        Returns:
            Sequence ids the engine must give up: a stop string ended them, or they failed here.
        """
        to_abort: list[str] = []
        now = time.time()
        for output in outputs:
            state = self._by_sequence.get(output.request_id)
            if state is None:
                continue  # given up while the engine still worked on it
            try:
                self._process_one(state, output, timestamp, now, stats, to_abort)
            except Exception as error:
                logger.exception("Output of request %s could not be processed", state.request_id)
                to_abort += self._fail(state, RequestError(f"{type(error).__name__}: {error}", kind="internal"))
        return to_abort

    def abort(self, request_id: str) -> list[str]:
        """End every request of that id with finish reason ``abort``. Sequence ids the engine must give up."""
        sequence_ids: list[str] = []
        for state in list(self._by_request.get(request_id, ())):
            sequence_ids += state.open
            sequences = list(state.open.values())
            self._forget(state)
            for sequence in sequences:
                sequence.finish(FinishReason.ABORT)
                state.deliver(sequence)
        return sequence_ids

    def abort_all(self) -> list[str]:
        """:meth:`abort` for every request."""
        return [sequence for request_id in list(self._by_request) for sequence in self.abort(request_id)]

    def discard(self, state: RequestState) -> list[str]:
        """Forget a request nobody listens to any more. Sequence ids the engine must give up."""
        sequence_ids = list(state.open)
        self._forget(state)
        state.open.clear()
        return sequence_ids

    def fail_all(self, error: Exception) -> None:
        """End every request with ``error``."""
        for states in list(self._by_request.values()):
            for state in list(states):
                self._fail(state, error)

    # ---- parts ----

    def _process_one(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        timestamp: float,
        now: float,
        stats: IterationStats,
        to_abort: list[str],
    ) -> None:
        sequence = state.open[output.request_id]
        if output.new_token_ids:
            self._awaiting_first.pop(output.request_id, None)
        state.take_prompt_logprobs(output, sequence)
        if sequence.take(output, timestamp, now, stats):
            to_abort.append(output.request_id)
        if output.finish_reason is FinishReason.ERROR:
            message = output.error or "The engine could not finish this request."
            to_abort += self._fail(state, RequestError(message, kind=output.error_kind))
            return
        state.deliver(sequence)
        if sequence.is_finished:
            self._forget_sequence(sequence)
        if state.is_finished:
            state.count(stats)
            self._forget(state)

    def _fail(self, state: RequestState, error: Exception) -> list[str]:
        sequence_ids = list(state.open)
        self._forget(state)
        state.fail(error)
        return sequence_ids

    def _forget_sequence(self, sequence: SequenceState) -> None:
        self._by_sequence.pop(sequence.sequence_id, None)
        self._awaiting_first.pop(sequence.sequence_id, None)

    def _forget(self, state: RequestState) -> None:
        for sequence in state.open.values():
            self._forget_sequence(sequence)
        states = self._by_request.get(state.request_id, [])
        if state in states:
            states.remove(state)
            if not states:
                del self._by_request[state.request_id]
