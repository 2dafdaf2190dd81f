"""What a request returns, shared by the Python API and the HTTP layer."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Score of one candidate token: natural-log probability, 1-based rank, its text when detokenized."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id → score for one position; the sampled (or prompt) token comes first, then the top N."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence. In DELTA mode text, token_ids and logprobs hold only what is new."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestTimes:
    """Seconds. ``arrival`` is wall clock; the others are the engine's monotonic clock."""

    arrival: float = 0.0
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    first_token_latency: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """State of one request as handed to its consumer."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    num_created_cache_tokens: int | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
