"""Figures out of outcomes: rates, latencies and their percentiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_clone.benchmarks.serve.sample import Outcome

LATENCIES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client-side Queueing", "Client Queue Time"),
    "e2el_including_client_queue": ("Queue-inclusive End-to-end Latency", "E2EL incl. Client Queue"),
}
"""Name → title of its block, name in its rows."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A latency over all requests, in milliseconds; all 0 without data."""

    mean: float
    median: float
    std: float
    percentiles: list[tuple[float, float]]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> "Spread":
        values = np.asarray(seconds or [0.0]) * 1e3
        found = [(p, float(np.percentile(values, p))) for p in percentiles]
        return cls(float(values.mean()), float(np.median(values)), float(values.std()), found)


@dataclass(frozen=True, slots=True)
class Probes:
    """One-token requests sent beside the load; latencies in milliseconds."""

    completed: int
    failed: int
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Probes | None":
        """None when no probe came through."""
        times = [o.latency * 1e3 for o in outcomes if o.success]
        if not times:
            return None
        return cls(
            len(times),
            len(outcomes) - len(times),
            float(np.median(times)),
            float(np.percentile(times, 99)),
            max(times),
        )


@dataclass(frozen=True, slots=True)
class Speculation:
    """How the server's drafts fared, from its own counters over the run."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_at: list[float]
    """Share of drafts whose token at a position was accepted."""

    @property
    def acceptance_rate(self) -> float:
        """Percent of drafted tokens."""
        return 100 * self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per step, the one that needs no draft among them."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0


@dataclass(slots=True)
class Figures:
    """What a run showed. Rates are per second; only successful requests count."""

    duration: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    goodput: float | None
    peak_output_rate: float
    peak_concurrency: int
    spreads: dict[str, Spread]
    probes: Probes | None = None
    speculation: Speculation | None = None
    rate_changes: list[tuple[int, str]] = field(default_factory=list)
    """(whole requests per second reached, ISO time)."""

    def per_second(self, count: float) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def figures_of(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: dict[str, float] | None = None,
) -> Figures:
    """Figures of a run.

    Args:
        duration: seconds from the first gap to the last answer.
        metrics: names of :data:`LATENCIES` to report, in any order.
        goodput: limits in milliseconds per name (ttft, tpot, e2el).
    """
    done = [o for o in outcomes if o.success]
    values: dict[str, list[float]] = {
        "ttft": [o.ttft for o in done],
        "tpot": [o.tpot for o in done if o.output_len > 1],
        "itl": [gap for o in done for gap in o.gaps],
        "e2el": [o.latency for o in done],
        "client_queue_time": [o.queue_time for o in done],
        "e2el_including_client_queue": [o.queue_time + o.latency for o in done],
    }
    figures = Figures(
        duration,
        len(done),
        len(outcomes) - len(done),
        sum(o.prompt_len for o in done),
        sum(o.output_len for o in done),
        None,
        *_peaks(done),
        {name: Spread.of(values[name], percentiles) for name in LATENCIES if name in metrics},
    )
    if goodput is not None:
        figures.goodput = figures.per_second(sum(_is_good(o, goodput) for o in done))
    return figures


def _is_good(outcome: Outcome, limits: dict[str, float]) -> bool:
    have = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(have[name] * 1e3 <= limit for name, limit in limits.items())


def _peaks(done: Sequence[Outcome]) -> tuple[float, int]:
    """Most token events, and most open requests, in any whole second after the first start."""
    if not done:
        return 0.0, 0
    begun = min(o.start for o in done)
    seconds = int(max(o.start + o.latency for o in done) - begun) + 1
    tokens = np.zeros(seconds)
    edges = np.zeros(seconds + 1, dtype=np.int64)
    for o in done:
        first = o.start - begun
        if o.gaps or o.ttft:
            np.add.at(tokens, (first + o.ttft + np.cumsum([0.0, *o.gaps])).astype(int).clip(0, seconds - 1), 1)
        edges[int(first)] += 1
        edges[int(first + o.latency) + 1] -= 1
    return float(tokens.max()), int(edges.cumsum().max())
