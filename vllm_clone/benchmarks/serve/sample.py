"""What passes between the phases of a run: a request to be sent, and what became of it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Sample:
    """One request of a data set.

    Attributes:
        prompt: text, or token ids.
        prompt_len: tokens of the prompt by the client's tokenizer; 1 without one.
        output_len: tokens to ask for.
        timestamp: seconds after the start at which a trace sends it, or None.
        extra_body: fields of this request only.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    timestamp: float | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times are in seconds, ``start`` on :func:`time.perf_counter`'s clock.

    Attributes:
        ttft: from the start to the first event with a token; 0 without one.
        gaps: between events with tokens.
        latency: from the start to the last event with a token, or to the end of a reply that is no stream.
        output_len: tokens by the server's count.
        queue_time: from when it was due until it was sent.
    """

    prompt_len: int
    start: float = 0.0
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_len: int = 0
    queue_time: float = 0.0
    text: str = ""
    success: bool = False
    error: str = ""

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 for a single token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0
