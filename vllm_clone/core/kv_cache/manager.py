"""KVCacheManager: what the scheduler asks of the KV cache, over all groups at once."""

from dataclasses import dataclass

from vllm_clone.config.kv_cache import KVCacheConfig
from vllm_clone.core.kv_cache.block_pool import BlockPool, KVBlock
from vllm_clone.core.kv_cache.events import KVEventLog
from vllm_clone.core.kv_cache.group_manager import GroupManager, make_group_manager
from vllm_clone.core.kv_cache.residency import Residency
from vllm_clone.core.request import Request
from vllm_clone.step import BlockIds


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks per group that start a request, and how many of its tokens they cover."""

    blocks: tuple[list[KVBlock], ...]
    num_tokens: int
    longest: int
    """Tokens that the first group has cached; where the others should keep a window for the next request."""


class KVCacheManager:
    """Block tables of every request over one pool.

    Args:
        config: groups and pool size; all groups have one block size.
        max_model_len: longest sequence in tokens.
        enable_caching: whether prefixes are looked up and kept.
        max_in_flight: most tokens one step computes for a request; bounds what a sliding window holds.
        watermark: fraction of blocks that admission leaves free.
        residency: is told what happens to blocks.
        events: is told which prefixes can be found.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_model_len: int,
        enable_caching: bool,
        max_in_flight: int,
        watermark: float = 0.0,
        residency: Residency | None = None,
        events: KVEventLog | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight
        self.enable_caching = enable_caching
        self.pool = BlockPool(config.num_blocks, enable_caching, residency, events)
        self._events = events
        self.block_size = config.groups[0].spec.block_size
        specs = [g.spec for g in config.groups]
        assert all(spec.block_size == self.block_size for spec in specs)
        self.groups: list[GroupManager] = [make_group_manager(s, i, self.pool) for i, s in enumerate(specs)]
        self._watermark_blocks = int(watermark * config.num_blocks)
        self._no_hit = PrefixHit(tuple([] for _ in self.groups), 0, 0)
        self._quiet_until: dict[str, int] = {}
        """Request id → most tokens for which its tables and the index of cached blocks need no change."""

    @property
    def usage(self) -> float:
        return self.pool.usage

    def max_blocks(self, num_tokens: int) -> int:
        """Most blocks a request of ``num_tokens`` tokens ever holds at once, over all groups."""
        return sum(g.max_blocks(num_tokens, self.max_in_flight) for g in self.groups)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a request that grows to ``num_tokens`` tokens fits the pool when it is alone."""
        return self.max_blocks(num_tokens) <= self.pool.num_blocks - 1

    def find_prefix(self, request: Request) -> PrefixHit:
        """Longest prefix all groups have cached, at most ``num_tokens − 1`` tokens (one must be computed)."""
        if not self.enable_caching or request.skip_prefix_cache:
            return self._no_hit
        hashes = request.block_hashes
        limit = min((request.num_tokens - 1) // self.block_size, len(hashes))
        hits: list[list[KVBlock]] = []
        for group in self.groups:  # each group can only shorten the candidate; full attention comes first
            hits.append(group.find_prefix(hashes, limit))
            limit = len(hits[-1])
        longest = len(hits[0])
        while len({len(h) for h in hits}) > 1:
            limit = min(len(h) for h in hits)
            pairs = zip(self.groups, hits, strict=True)
            hits = [h if len(h) == limit else g.find_prefix(hashes, limit) for g, h in pairs]
        return PrefixHit(tuple(hits), len(hits[0]) * self.block_size, longest * self.block_size)

    def admit(
        self, request: Request, num_new: int, hit: PrefixHit, *, reserve_full: bool, keep_watermark: bool
    ) -> BlockIds | None:
        """Start a waiting request's tables: the blocks of its prefix hit, then slots for ``num_new`` tokens.

        Args:
            request: a request without blocks.
            num_new: tokens to compute after the hit.
            hit: what ``find_prefix`` found for the request in this step.
            reserve_full: admit only if all tokens the request has now fit the free blocks.
            keep_watermark: leave the watermark's blocks free.

        Returns:
            The ids of its tables per group; None, and nothing done, when too few blocks are free.
        """
        null = self.pool.null_block
        taken_by_hit = sum(b.ref_count == 0 and b is not null for blocks in hit.blocks for b in blocks)
        spare = self.pool.num_free - taken_by_hit - (self._watermark_blocks if keep_watermark else 0)
        if reserve_full and not self._full_sequence_fits(request, hit, spare):
            return None
        request_id, total = request.request_id, hit.num_tokens + num_new
        pairs = list(zip(self.groups, hit.blocks, strict=True))
        if sum(g.num_new_blocks(request_id, total, len(h), hit.num_tokens) for g, h in pairs) > spare:
            return None
        resume_points = ((request.num_prompt_tokens - 1) // self.block_size, hit.longest // self.block_size)
        for group, blocks in pairs:  # every group's hit is held before any group takes new blocks
            self.pool.touch(blocks)
            group.adopt(request_id, blocks, resume_points)
        for group in self.groups:
            group.extend(request_id, total, hit.num_tokens)
        self._index_full_blocks(request, hit.num_tokens, total)
        return tuple([b.block_id for b in group.tables[request_id]] for group in self.groups)

    def grow(self, request: Request, num_new: int) -> BlockIds | None:
        """Give a running request slots for ``num_new`` more tokens, and free what fell out of sliding windows.

        Returns:
            The ids to append to its tables per group, an empty tuple if there are none; None when too few
            blocks are free.
        """
        request_id, computed = request.request_id, request.num_computed_tokens
        total = computed + num_new
        if total <= self._quiet_until[request_id]:
            return ()
        need = 0
        for group in self.groups:
            group.free_skipped(request_id, computed)
            need += group.num_new_blocks(request_id, total, 0, computed)
        if need > self.pool.num_free:
            return None
        new = tuple([b.block_id for b in group.extend(request_id, total, computed)] for group in self.groups)
        self._index_full_blocks(request, computed, total)
        return new if any(new) else ()

    def free(self, request: Request) -> None:
        """Take back a request's blocks. Cached ones that its computed tokens fill stay cached.

        A preempted request's blocks for the tokens it was given in this very step are cached already but will
        never be written; ``num_computed_tokens`` tells them apart.
        """
        for group in self.groups:
            group.free(request.request_id, request.block_hashes, request.num_computed_tokens)
        self._quiet_until.pop(request.request_id, None)
        if self._events is not None:
            self._events.describe(request)

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset()

    def _index_full_blocks(self, request: Request, computed: int, total: int) -> None:
        """Make the blocks that ``total`` tokens fill findable, before they are written: a layer writes keys and
        values before it attends, so that a request of the same step may already share them."""
        request_id = request.request_id
        if self.enable_caching:
            for group in self.groups:
                group.cache_full_blocks(request_id, request.block_hashes, min(total, request.num_tokens))
            if self._events is not None:
                self._events.describe(request)
        self._quiet_until[request_id] = min(group.quiet_until(request_id, computed) for group in self.groups)

    def _full_sequence_fits(self, request: Request, hit: PrefixHit, spare: int) -> bool:
        need = 0
        for group, blocks in zip(self.groups, hit.blocks, strict=True):
            live = sum(b is not self.pool.null_block for b in blocks)
            need += max(group.max_blocks(request.num_tokens, self.max_in_flight) - live, 0)
        return need <= spare
