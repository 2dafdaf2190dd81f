"""What the frontend counts and times: plain values, filled by the output processor, read by stat loggers."""

from dataclasses import dataclass, field
from typing import Protocol

from vllm_clone.messages import SchedulerStats


@dataclass(slots=True)
class FinishedRequestStats:
    """One sequence that ended by itself or by the engine. Times in seconds."""

    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    max_tokens: int
    """The limit after defaults."""
    num_preemptions: int
    e2e_latency: float
    """Arrival to finish, as this process saw it."""
    queued_time: float
    prefill_time: float
    """First scheduled to first token."""
    decode_time: float
    """First token to last token."""
    inference_time: float
    """First scheduled to last token."""

    @property
    def time_per_output_token(self) -> float:
        """Mean decode time per token after the first; 0 when there is none."""
        return self.decode_time / (self.num_generation_tokens - 1) if self.num_generation_tokens > 1 else 0.0


@dataclass(slots=True)
class IterationStats:
    """What one batch of engine outputs brought."""

    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of sequences whose first token came, cached ones included."""
    num_cached_tokens: int = 0
    """Of those, tokens that came from the prefix cache."""
    time_to_first_token: list[float] = field(default_factory=list)
    """Arrival to first token, wall clock, seconds."""
    inter_token_latency: list[float] = field(default_factory=list)
    """Gaps between outputs of a sequence, engine clock, seconds."""
    finished: list[FinishedRequestStats] = field(default_factory=list)
    request_n: list[int] = field(default_factory=list)
    """``n`` of each request whose last sequence ended."""
    request_max_generation_tokens: list[int] = field(default_factory=list)
    """Tokens of the longest sequence of each such request."""

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens computed plus tokens generated."""
        return self.num_prompt_tokens - self.num_cached_tokens + self.num_generation_tokens


class StatLogger(Protocol):
    """Receives statistics in the event loop's thread; must be quick."""

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """After each batch of engine outputs; ``scheduler`` is None when the batch carries no engine state."""

    def record_rejection(self, reason: str) -> None:
        """A request was refused because of ``max_num_queued_reqs`` or ``max_num_queued_tokens``."""
