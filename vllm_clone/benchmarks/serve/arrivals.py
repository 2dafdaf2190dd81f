"""When each request is due."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RampUp:
    """A request rate that grows from ``start`` to ``end`` requests per second, linearly or exponentially."""

    strategy: str
    start: int
    end: int

    def rate(self, progress: float) -> float:
        """Requests per second at a share (0 to 1) of the requests."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """``due``: seconds after the start, per request; ``rates``: requests per second at each of them."""

    due: list[float]
    rates: list[float]


def schedule(count: int, rate: float, burstiness: float, ramp_up: RampUp | None, seed: int) -> Arrivals:
    """Arrivals with gamma-distributed gaps, burstiness 1 being a Poisson process and infinity a metronome.

    At a constant rate the gaps are scaled so that the last request leaves after exactly ``count / rate`` seconds.
    """
    rates = [rate if ramp_up is None else ramp_up.rate(i / max(count - 1, 1)) for i in range(count)]
    random = np.random.RandomState(seed)
    gaps = [_gap(random, r, burstiness) for r in rates]
    due = np.cumsum(gaps)
    if ramp_up is None and count and due[-1] > 0:
        due *= count / rate / due[-1]
    return Arrivals(due.tolist(), rates)


def _gap(random: np.random.RandomState, rate: float, burstiness: float) -> float:
    if rate == float("inf"):
        return 0.0
    if burstiness == float("inf"):
        return 1 / rate
    return float(random.gamma(shape=burstiness, scale=1 / (rate * burstiness)))
