"""How long a sample of KV blocks keep a prefix, and how often they are used: --kv-cache-metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_clone.messages import KVEviction


@dataclass(slots=True)
class _Life:
    born: float
    last_use: float
    gaps: list[float] = field(default_factory=list)


class Residency:
    """Follows a share of the blocks from allocation until what they cache is overwritten.

    Args:
        share: of the allocations that are followed, in (0, 1].
        clock: seconds, monotonic.
        chance: a random number in [0, 1).
    """

    def __init__(self, share: float, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self._share = share
        self._clock = clock
        self._chance = chance
        self._lives: dict[int, _Life] = {}
        self._evictions: list[KVEviction] = []

    def allocated(self, block_id: int) -> None:
        """A block begins a new life; what it was before no longer counts."""
        self._lives.pop(block_id, None)
        if self._chance() < self._share:
            now = self._clock()
            self._lives[block_id] = _Life(now, now)

    def used(self, block_id: int) -> None:
        """A prefix hit took the block."""
        life = self._lives.get(block_id)
        if life is not None:
            now = self._clock()
            life.gaps.append(now - life.last_use)
            life.last_use = now

    def evicted(self, block_id: int) -> None:
        """The prefix that the block cached is about to be overwritten."""
        life = self._lives.pop(block_id, None)
        if life is not None:
            now = self._clock()
            self._evictions.append(KVEviction(now - life.born, now - life.last_use, life.gaps))

    def take(self) -> list[KVEviction]:
        """Evictions since the last call."""
        taken, self._evictions = self._evictions, []
        return taken
