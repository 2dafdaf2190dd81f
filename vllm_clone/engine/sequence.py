"""One generated sequence as the frontend sees it: ids, text, scores, times, and what of it has been handed out."""

from vllm_clone.engine.detokenizer import Detokenizer
from vllm_clone.engine.logprobs import MAX_CONTEXT, TokenTexts, position_logprobs
from vllm_clone.messages import EngineCoreOutput, EngineCoreRequest, EventType, FinishReason
from vllm_clone.metrics.stats import FinishedRequestStats, IterationStats
from vllm_clone.outputs import CompletionOutput, PositionLogprobs, RequestTimes
from vllm_clone.sampling_params import RequestOutputKind
from vllm_clone.tokenizers.base import Tokenizer


class SequenceState:
    """Takes in engine outputs with :meth:`take`, gives out completions with :meth:`emit`.

    Args:
        core: what the engine was asked.
        index: which of the request's ``n`` choices this is.
        texts: text of single tokens for logprobs; None when no text is wanted.
        stream_interval: tokens between emissions; the first token and the end are emitted at once.
    """

    def __init__(
        self,
        core: EngineCoreRequest,
        index: int,
        tokenizer: Tokenizer | None,
        texts: TokenTexts | None,
        stream_interval: int = 1,
    ) -> None:
        params = core.sampling_params
        self.sequence_id = core.request_id
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.times = RequestTimes(arrival=core.arrival_time)
        self.num_cached_tokens = 0
        self.num_created_cache_tokens = 0
        self.num_preemptions = 0
        self._num_prompt_tokens = len(core.prompt_token_ids)
        self._tail = core.prompt_token_ids[-MAX_CONTEXT:]
        self._kind = params.output_kind
        self._max_tokens = params.max_tokens or 0
        self._interval = max(stream_interval, params.stream_interval or 1)
        self._detokenizer = Detokenizer(tokenizer, core.prompt_token_ids, params)
        self._texts = texts if params.detokenize else None
        wants_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
        self._logprobs: list[PositionLogprobs] | None = [] if wants_logprobs else None
        self._cumulative: float | None = 0.0 if wants_logprobs else None
        self._sent_tokens = 0
        self._sent_chars = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self._detokenizer.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, output: EngineCoreOutput, timestamp: float, now: float, stats: IterationStats) -> bool:
        """Take in one engine output.

        Args:
            timestamp: engine monotonic clock; ``now``: wall clock of this process, seconds.

        Returns:
            Whether a stop string ended the sequence, so that the engine must be told to give it up.
        """
        self._take_events(output)
        if output.new_token_ids:
            self._take_times(len(output.new_token_ids), timestamp, now, stats)
        before = self.num_output_tokens
        stop = self._detokenizer.update(output.new_token_ids, output.finish_reason is FinishReason.STOP)
        self._take_logprobs(output, before)
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        if self.finish_reason is not None:
            stats.finished.append(self._finished_stats(now))
        return stop is not None and output.finish_reason is None

    def finish(self, reason: FinishReason) -> None:
        """End the sequence from this side."""
        self.finish_reason = reason

    def emit(self) -> CompletionOutput | None:
        """What the consumer is to be told now; None when it is not its time."""
        count, finished = self.num_output_tokens, self.is_finished
        if not finished:
            if self._kind is RequestOutputKind.FINAL_ONLY:
                return None
            if self._sent_tokens and count - self._sent_tokens < self._interval:
                return None
        first_token, first_char = 0, 0
        end = self._detokenizer.released(finished)
        if self._kind is RequestOutputKind.DELTA:
            first_token, first_char = self._sent_tokens, self._sent_chars
        self._sent_tokens, self._sent_chars = count, end
        return CompletionOutput(
            index=self.index,
            text=self._detokenizer.text[first_char:end],
            token_ids=self._detokenizer.token_ids[first_token:],
            cumulative_logprob=self._cumulative,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )

    def _take_events(self, output: EngineCoreOutput) -> None:
        for event in output.events:
            if event.type is EventType.QUEUED:
                self.times.queued = event.timestamp
            elif event.type is EventType.PREEMPTED:
                self.num_preemptions += 1
            elif not self.times.scheduled:
                self.times.scheduled = event.timestamp
        if output.prefill_stats is not None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
            self.num_created_cache_tokens = output.prefill_stats.num_created_cache_tokens

    def _take_times(self, num_new: int, timestamp: float, now: float, stats: IterationStats) -> None:
        stats.num_generation_tokens += num_new
        times = self.times
        if not times.first_token:
            times.first_token = timestamp
            times.first_token_latency = now - times.arrival
            stats.time_to_first_token.append(times.first_token_latency)
            stats.num_prompt_tokens += self._num_prompt_tokens
            stats.num_cached_tokens += self.num_cached_tokens
        else:
            stats.inter_token_latency.append(timestamp - times.last_token)
        times.last_token = timestamp

    def _take_logprobs(self, output: EngineCoreOutput, before: int) -> None:
        if self._logprobs is None or self._cumulative is None or output.logprobs is None:
            return
        ids = self._detokenizer.token_ids
        for position in range(before, len(ids)):
            context = self._tail + ids[max(position - MAX_CONTEXT, 0) : position]
            row = position - before
            self._logprobs.append(position_logprobs(output.logprobs, row, self._texts, context))
            self._cumulative += output.logprobs.logprobs[row][0]

    def _finished_stats(self, now: float) -> FinishedRequestStats:
        times = self.times
        started = times.scheduled or times.first_token
        return FinishedRequestStats(
            finish_reason=str(self.finish_reason),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generation_tokens=self.num_output_tokens,
            max_tokens=self._max_tokens,
            num_preemptions=self.num_preemptions,
            e2e_latency=now - times.arrival,
            queued_time=max(started - times.queued, 0.0) if times.queued else 0.0,
            prefill_time=max(times.first_token - started, 0.0),
            decode_time=times.last_token - times.first_token,
            inference_time=max(times.last_token - started, 0.0),
        )
