"""What the KV cache tells routers: which prefix blocks it holds, and which no longer. vLLM's format."""

from collections.abc import Sequence

import msgspec

from vllm_clone.config.kv_cache import KVCacheSpec, SlidingWindowSpec
from vllm_clone.core.kv_cache.hashing import BlockHash
from vllm_clone.core.request import Request

MEDIUM = "GPU"
"""Routers know the engine's own memory by this name, whatever the device."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """One change; a map whose ``type`` is the class name."""


class BlockStored(KVCacheEvent):
    """Blocks in a row that can be found from now on."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Of the block before the first; None at the start of a sequence."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """The cache salt, for the block that it is part of."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks of which no copy is left."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """The prefix cache has been reset."""


class KVEventLog:
    """Collects events between two reports. A hash is stored with its first copy and removed with its last."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        """``specs``: one per KV cache group."""
        self._specs = specs
        self._events: list[KVCacheEvent] = []
        self._stored: list[tuple[BlockHash, int]] = []

    def stored(self, block_hash: BlockHash, group: int) -> None:
        """A prefix block can be found; :meth:`describe` must follow while its request is at hand."""
        self._stored.append((block_hash, group))

    def removed(self, block_hash: BlockHash, group: int) -> None:
        if (block_hash, group) in self._stored:  # nobody has heard of it yet
            self._stored.remove((block_hash, group))
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], MEDIUM, group))

    def cleared(self) -> None:
        self._stored.clear()
        self._events.append(AllBlocksCleared())

    def describe(self, request: Request) -> None:
        """Make events of what has been stored since the last call, all of it blocks of ``request``."""
        if not self._stored:
            return
        hashes = request.block_hashes
        places = {block_hash: i for i, block_hash in enumerate(hashes)}
        for group, spec in enumerate(self._specs):
            found = sorted(places[block_hash] for block_hash, owner in self._stored if owner == group)
            while found:
                count = next((n for n in range(1, len(found)) if found[n] != found[0] + n), len(found))
                self._events.append(_stored_event(request, found[0], count, group, spec))
                found = found[count:]
        self._stored.clear()

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        taken, self._events = self._events, []
        return taken


def _stored_event(request: Request, first: int, count: int, group: int, spec: KVCacheSpec) -> BlockStored:
    size, hashes = spec.block_size, request.block_hashes
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    salted = first == 0 and request.cache_salt is not None
    keys: list[tuple[str, ...] | None] = [None] * count
    if salted and request.cache_salt is not None:
        keys[0] = (request.cache_salt,)
    return BlockStored(
        block_hashes=hashes[first : first + count],
        parent_block_hash=hashes[first - 1] if first else None,
        token_ids=request.all_token_ids[first * size : (first + count) * size],
        block_size=size,
        lora_id=None,
        medium=MEDIUM,
        lora_name=None,
        extra_keys=keys if salted else None,
        group_idx=group,
        kv_cache_spec_kind="sliding_window" if window is not None else "full_attention",
        kv_cache_spec_sliding_window=window,
    )
