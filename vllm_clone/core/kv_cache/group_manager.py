"""Block tables of one KV cache group: how many blocks a request needs, what a prefix hit is, what may be freed."""

from collections.abc import Sequence

from vllm_clone.config.kv_cache import KVCacheSpec, SlidingWindowSpec, cdiv
from vllm_clone.core.kv_cache.block_pool import BlockPool, KVBlock
from vllm_clone.core.kv_cache.hashing import BlockHash


class GroupManager:
    """Full attention: a request keeps every block until it ends."""

    def __init__(self, spec: KVCacheSpec, group: int, pool: BlockPool) -> None:
        self.block_size = spec.block_size
        self.group = group
        self.pool = pool
        self.tables: dict[str, list[KVBlock]] = {}
        self._num_cached: dict[str, int] = {}

    def find_prefix(self, hashes: Sequence[BlockHash], max_blocks: int) -> list[KVBlock]:
        """Longest run of cached blocks from the start, at most ``max_blocks``."""
        hit: list[KVBlock] = []
        for block_hash in hashes[:max_blocks]:
            block = self.pool.get_cached(block_hash, self.group)
            if block is None:
                break
            hit.append(block)
        return hit

    def num_new_blocks(self, request_id: str, num_tokens: int, num_hit_blocks: int, num_computed: int) -> int:
        """Blocks to allocate so that ``num_tokens`` tokens have a slot."""
        owned = len(self.tables.get(request_id, ()))
        return max(cdiv(num_tokens, self.block_size) - owned - num_hit_blocks, 0)

    def max_blocks(self, num_tokens: int, max_in_flight: int) -> int:
        """Most blocks a request of ``num_tokens`` tokens ever holds at once."""
        return cdiv(num_tokens, self.block_size)

    def skipped_tokens(self, num_computed: int) -> int:
        """Leading tokens no later token attends to."""
        return 0

    def adopt(self, request_id: str, hit: list[KVBlock], resume_points: Sequence[int]) -> None:
        """Start a request's table with the (already touched) blocks of its prefix hit.

        ``resume_points`` are the block counts at which a later request is likely to start from this one's prefix.
        """
        self.tables[request_id] = list(hit)
        self._num_cached[request_id] = len(hit)

    def extend(self, request_id: str, num_tokens: int, num_computed: int) -> list[KVBlock]:
        """Allocate up to ``num_tokens`` slots; the new blocks."""
        table = self.tables.setdefault(request_id, [])
        new = self.pool.allocate(max(cdiv(num_tokens, self.block_size) - len(table), 0))
        table += new
        return new

    def cache_full_blocks(self, request_id: str, hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Index the blocks that ``num_tokens`` tokens fill and that are not indexed yet."""
        done, full = self._num_cached.get(request_id, 0), num_tokens // self.block_size
        if full <= done:
            return
        table, pool, group = self.tables[request_id], self.pool, self.group
        for i in range(done, full):
            if table[i] is not pool.null_block and self._worth_keeping(request_id, i):
                pool.cache(table[i], hashes[i], group)
        self._num_cached[request_id] = full

    def quiet_until(self, request_id: str, num_computed: int) -> int:
        """Most tokens for which neither the table nor the index of cached blocks needs a change."""
        owned, indexed = len(self.tables[request_id]), self._num_cached[request_id]
        if not self.pool.enable_caching:
            return owned * self.block_size
        return min(owned * self.block_size, (indexed + 1) * self.block_size - 1)

    def free_skipped(self, request_id: str, num_computed: int) -> None:
        """Free blocks that only hold tokens outside every later token's reach."""

    def free(self, request_id: str, hashes: Sequence[BlockHash], num_computed: int) -> None:
        """Give a request's blocks back; those past its ``num_computed`` written tokens leave the index."""
        table = self.tables.pop(request_id, [])
        for block in table[num_computed // self.block_size : self._num_cached.pop(request_id, 0)]:
            self.pool.forget(block)
        self.pool.free(reversed(table))

    def _worth_keeping(self, request_id: str, index: int) -> bool:
        return True


class SlidingWindowManager(GroupManager):
    """A layer sees the last W tokens: blocks that fall out of the window become the null block.

    Only the windows before likely resume points are indexed (sparse retention): before the last full block of the
    prompt, before the end of a prefix that other groups have cached, and before the place where the request ends
    or is preempted. Everything else would push useful prefixes out of the pool and never be asked for.
    """

    def __init__(self, spec: SlidingWindowSpec, group: int, pool: BlockPool) -> None:
        super().__init__(spec, group, pool)
        self.window = spec.sliding_window
        self._tail = cdiv(spec.sliding_window - 1, spec.block_size)
        """Blocks a prefix hit needs before the first token to compute."""
        self._resume_points: dict[str, Sequence[int]] = {}

    def skipped_tokens(self, num_computed: int) -> int:
        return max(0, num_computed - self.window + 1)

    def max_blocks(self, num_tokens: int, max_in_flight: int) -> int:
        reach = min(self.window - 1 + max_in_flight, num_tokens)
        return min(cdiv(reach, self.block_size) + 1, cdiv(num_tokens, self.block_size))

    def find_prefix(self, hashes: Sequence[BlockHash], max_blocks: int) -> list[KVBlock]:
        """Rightmost run of cached blocks that covers a window, null blocks before it.

        A shorter run counts when it starts at position 0.
        """
        end = min(max_blocks, len(hashes))
        if self._tail == 0:
            return [self.pool.null_block] * end
        run: list[KVBlock] = []
        for i in range(end - 1, -1, -1):
            block = self.pool.get_cached(hashes[i], self.group)
            if block is None:
                run, end = [], i
                continue
            run.append(block)
            if len(run) == self._tail:
                break
        run.reverse()
        return [self.pool.null_block] * (end - len(run)) + run

    def num_new_blocks(self, request_id: str, num_tokens: int, num_hit_blocks: int, num_computed: int) -> int:
        held = len(self.tables.get(request_id, ())) + num_hit_blocks
        skipped = self.skipped_tokens(num_computed) // self.block_size
        return max(cdiv(num_tokens, self.block_size) - max(held, skipped), 0)

    def adopt(self, request_id: str, hit: list[KVBlock], resume_points: Sequence[int]) -> None:
        super().adopt(request_id, hit, resume_points)
        self._resume_points[request_id] = resume_points

    def extend(self, request_id: str, num_tokens: int, num_computed: int) -> list[KVBlock]:
        table = self.tables.setdefault(request_id, [])
        gap = self.skipped_tokens(num_computed) // self.block_size - len(table)
        padding = [self.pool.null_block] * max(gap, 0)
        table += padding
        return padding + super().extend(request_id, num_tokens, num_computed)

    def free_skipped(self, request_id: str, num_computed: int) -> None:
        table = self.tables.get(request_id)
        if not table:
            return
        freed = []
        for i in range(min(self.skipped_tokens(num_computed) // self.block_size, len(table)) - 1, -1, -1):
            if table[i] is self.pool.null_block:
                break
            freed.append(table[i])
            table[i] = self.pool.null_block
        self.pool.free(freed)

    def quiet_until(self, request_id: str, num_computed: int) -> int:
        next_skipped = self.skipped_tokens(num_computed) // self.block_size + 1
        return min(super().quiet_until(request_id, num_computed), next_skipped * self.block_size + self.window - 1)

    def free(self, request_id: str, hashes: Sequence[BlockHash], num_computed: int) -> None:
        self._index_last_window(request_id, hashes, num_computed)
        super().free(request_id, hashes, num_computed)
        self._resume_points.pop(request_id, None)

    def _index_last_window(self, request_id: str, hashes: Sequence[BlockHash], num_computed: int) -> None:
        """Let the next turn, or the request itself after preemption, start where this one stopped."""
        end = min(num_computed // self.block_size, len(hashes))
        start = max(end - self._tail, 0)
        window = self.tables.get(request_id, [])[start:end]
        if self.pool.null_block not in window:
            for block, block_hash in zip(window, hashes[start:end], strict=True):
                self.pool.cache(block, block_hash, self.group)

    def _worth_keeping(self, request_id: str, index: int) -> bool:
        return any(point - self._tail <= index < point for point in self._resume_points[request_id])


def make_group_manager(spec: KVCacheSpec, group: int, pool: BlockPool) -> GroupManager:
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowManager(spec, group, pool)
    return GroupManager(spec, group, pool)
