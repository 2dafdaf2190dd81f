"""KVCacheManager: what the scheduler asks of the KV cache, over all groups at once."""

from dataclasses import dataclass

from vllm_clone.config.kv_cache import KVCacheConfig
from vllm_clone.core.kv_cache.block_pool import BlockPool, KVBlock
from vllm_clone.core.kv_cache.group_manager import GroupManager, make_group_manager
from vllm_clone.core.request import Request
from vllm_clone.step import BlockIds


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks per group that start a request, and how many of its tokens they cover."""

    blocks: tuple[list[KVBlock], ...]
    num_tokens: int


class KVCacheManager:
    """Block tables of every request over one pool.

    Args:
        config: groups and pool size; all groups have one block size.
        max_model_len: longest sequence in tokens.
        enable_caching: whether prefixes are looked up and kept.
        max_in_flight: most tokens one step computes for a request; bounds what a sliding window holds.
        watermark: fraction of blocks that admission leaves free.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_model_len: int,
        enable_caching: bool,
        max_in_flight: int,
        watermark: float = 0.0,
    ) -> None:
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight
        self.enable_caching = enable_caching
        self.pool = BlockPool(config.num_blocks, enable_caching)
        self.block_size = config.groups[0].spec.block_size
        specs = [g.spec for g in config.groups]
        self.groups: list[GroupManager] = [make_group_manager(s, i, self.pool) for i, s in enumerate(specs)]
        self._watermark_blocks = int(watermark * config.num_blocks)
        self._no_hit = PrefixHit(tuple([] for _ in self.groups), 0)

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
        hits = [g.find_prefix(hashes, limit) for g in self.groups]
        while len({len(h) for h in hits}) > 1:  # each group can only shorten the candidate
            limit = min(len(h) for h in hits)
            pairs = zip(self.groups, hits, strict=True)
            hits = [h if len(h) == limit else g.find_prefix(hashes, limit) for g, h in pairs]
        return PrefixHit(tuple(hits), len(hits[0]) * self.block_size)

    def allocate(
        self, request: Request, num_new: int, hit: PrefixHit | None = None, *, admission: bool = False,
        reserve_full: bool = False, use_watermark: bool = False,
    ) -> BlockIds | None:  # fmt: skip
        """Give ``request`` slots for ``num_new`` more tokens (after its prefix hit, when it is admitted with one).

        Returns:
            The ids to append to its tables, per group (the hit's first); None when too few blocks are free.
        """
        request_id = request.request_id
        hit_blocks = hit.blocks if hit is not None else self._no_hit.blocks
        computed = request.num_computed_tokens + (hit.num_tokens if hit is not None else 0)
        total = min(computed + num_new, self.max_model_len)
        if not admission:
            for group in self.groups:
                group.free_skipped(request_id, request.num_computed_tokens)
        touched_free = sum(b.ref_count == 0 and b is not self.pool.null_block for bs in hit_blocks for b in bs)
        spare = self.pool.num_free - touched_free - (self._watermark_blocks if use_watermark else 0)
        if reserve_full and not self._full_sequence_fits(request, hit_blocks, spare):
            return None
        need = sum(
            g.num_new_blocks(request_id, total, len(h), computed) for g, h in zip(self.groups, hit_blocks, strict=True)
        )
        if need > spare:
            return None
        if admission:
            for group, blocks in zip(self.groups, hit_blocks, strict=True):
                self.pool.touch(blocks)
                group.adopt(request_id, blocks)
        new = tuple(
            [b.block_id for b in blocks] + [b.block_id for b in group.extend(request_id, total, computed)]
            for group, blocks in zip(self.groups, hit_blocks, strict=True)
        )
        if self.enable_caching:
            self.cache_blocks(request, min(computed + num_new, request.num_tokens))
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Index the blocks filled by the request's first ``num_tokens`` tokens."""
        for group in self.groups:
            group.cache_full_blocks(request.request_id, request.block_hashes, num_tokens)

    def free(self, request: Request) -> None:
        for group in self.groups:
            group.free(request.request_id)

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset()

    def _full_sequence_fits(self, request: Request, hit_blocks: tuple[list[KVBlock], ...], spare: int) -> bool:
        tokens = min(request.num_tokens, self.max_model_len)
        need = 0
        for group, blocks in zip(self.groups, hit_blocks, strict=True):
            live = sum(b is not self.pool.null_block for b in blocks)
            need += max(group.max_blocks(tokens, self.max_in_flight) - live, 0)
        return need <= spare
