"""The pool of KV blocks: reference counts, the list of free blocks, the index of cached ones."""

from collections.abc import Iterable

from vllm_clone.core.kv_cache.events import KVEventLog
from vllm_clone.core.kv_cache.hashing import BlockHash
from vllm_clone.core.kv_cache.residency import Residency

CacheKey = tuple[BlockHash, int]
"""Block hash and KV cache group."""


class KVBlock:
    """One block. ``ref_count`` is the number of block tables that hold it; ``key`` is set while it is cached."""

    __slots__ = ("block_id", "key", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: CacheKey | None = None
        self.prev: KVBlock | None = None
        self.next: KVBlock | None = None

    def __repr__(self) -> str:
        return f"KVBlock({self.block_id}, refs={self.ref_count}, cached={self.key is not None})"


class FreeList:
    """Doubly linked list of free blocks; the head is taken first, removal anywhere is O(1)."""

    def __init__(self, blocks: Iterable[KVBlock]) -> None:
        self._head, self._tail = KVBlock(-1), KVBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self.count = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVBlock) -> None:
        """Put a block at the tail: it is reused last."""
        self._insert(self._tail.prev, block, self._tail)

    def prepend(self, block: KVBlock) -> None:
        """Put a block at the head: it is reused first."""
        self._insert(self._head, block, self._head.next)

    def popleft(self) -> KVBlock:
        block = self._head.next
        assert block is not None
        assert block is not self._tail, "the caller checks that enough blocks are free"
        self.remove(block)
        return block

    def remove(self, block: KVBlock) -> None:
        before, after = block.prev, block.next
        assert before is not None
        assert after is not None
        before.next, after.prev = after, before
        block.prev = block.next = None
        self.count -= 1

    def ids(self) -> list[int]:
        """Block ids from head to tail."""
        out: list[int] = []
        block = self._head.next
        while block is not None and block is not self._tail:
            out.append(block.block_id)
            block = block.next
        return out

    def _insert(self, before: KVBlock | None, block: KVBlock, after: KVBlock | None) -> None:
        assert before is not None
        assert after is not None
        before.next = after.prev = block
        block.prev, block.next = before, after
        self.count += 1


class BlockPool:
    """Blocks 0 … num_blocks − 1; block 0 is the null block, a placeholder that is never freed or cached.

    Freed blocks that are cached keep their content and go to the tail of the free list, so that the least
    recently used prefix is overwritten first; uncached ones go to the head.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool,
        residency: Residency | None = None,
        events: KVEventLog | None = None,
    ) -> None:
        """``residency`` is told what happens to blocks, ``events`` which prefixes can be found."""
        self._residency = residency
        self._events = events
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_list = FreeList(self.blocks[1:])
        self._cached: dict[CacheKey, dict[int, KVBlock]] = {}

    @property
    def num_free(self) -> int:
        return self.free_list.count

    @property
    def usage(self) -> float:
        """Fraction of usable blocks that are taken, 0 … 1."""
        usable = self.num_blocks - 1
        return 1 - self.num_free / usable if usable else 0.0

    def get_cached(self, block_hash: BlockHash, group: int) -> KVBlock | None:
        """Any block that holds this prefix block of this group."""
        same = self._cached.get((block_hash, group))
        return next(iter(same.values())) if same else None

    def cache(self, block: KVBlock, block_hash: BlockHash, group: int) -> None:
        """Index a full block by its hash; a block keeps its first key."""
        if block.key is None:
            block.key = (block_hash, group)
            same = self._cached.setdefault(block.key, {})
            if not same and self._events is not None:
                self._events.stored(*block.key)
            same[block.block_id] = block

    def allocate(self, count: int) -> list[KVBlock]:
        """Take ``count`` blocks from the head of the free list, forgetting what they cached."""
        taken = []
        for _ in range(count):
            block = self.free_list.popleft()
            if self._residency is not None:
                if block.key is not None:
                    self._residency.evicted(block.block_id)
                self._residency.allocated(block.block_id)
            self.forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[KVBlock]) -> None:
        """Add a reference to cached blocks, taking free ones off the free list."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                self.free_list.remove(block)
            block.ref_count += 1
            if self._residency is not None:
                self._residency.used(block.block_id)

    def free(self, blocks: Iterable[KVBlock]) -> None:
        """Drop one reference each. Give a chain's blocks last first, so that its end is overwritten first."""
        uncached = []
        for block in blocks:
            if block is self.null_block:
                continue
            block.ref_count -= 1
            assert block.ref_count >= 0, f"{block} freed twice"
            if block.ref_count == 0:
                if block.key is None:
                    uncached.append(block)
                else:
                    self.free_list.append(block)
        for block in reversed(uncached):
            self.free_list.prepend(block)

    def reset(self) -> bool:
        """Forget every cached block; False, and nothing done, while any block is taken."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._cached.clear()
        if self._events is not None:
            self._events.cleared()
        for block in self.blocks:
            block.key = None
        return True

    def forget(self, block: KVBlock) -> None:
        """Take a block off the index, if it is there: its content is, or is about to be, something else."""
        key = block.key
        if key is not None:
            same = self._cached[key]
            del same[block.block_id]
            if not same:
                del self._cached[key]
                if self._events is not None:
                    self._events.removed(*key)
            block.key = None
