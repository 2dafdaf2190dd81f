"""Memory that every decode step reads from end to end: weights and the KV cache.

A step streams the whole of it, so what the processor pays to translate addresses counts: on 2 MiB pages the product of
one row with 2 GiB of weights takes a sixth less time than on 4 KiB pages. Small matrices share a region, because a huge
page cannot begin inside what ``malloc`` hands out for a matrix of its own.
"""

import contextlib
import math
import mmap
import threading
import weakref

import torch

_REGION_BYTES = 256 << 20
"""Only address space: pages come as they are written."""
_ALIGNMENT = 64

_lock = threading.Lock()
_region: weakref.ref[mmap.mmap] | None = None
_used = 0


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor for data that lives as long as the model: 64-byte aligned, zero, on huge pages where the system allows.

    Its memory goes back when all tensors of its region are gone.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    region, offset = _reserve(count * dtype.itemsize)
    return torch.frombuffer(region, dtype=dtype, count=count, offset=offset).view(shape)


def _reserve(nbytes: int) -> tuple[mmap.mmap, int]:
    """A region with ``nbytes`` unused bytes, and where they begin."""
    global _region, _used
    with _lock:
        region = None if _region is None else _region()
        if region is None or _used + nbytes > len(region):
            region = _new_region(nbytes)
            _region, _used = weakref.ref(region), 0
        offset = _used
        _used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return region, offset


def _new_region(nbytes: int) -> mmap.mmap:
    size = max(_REGION_BYTES, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            region.madvise(advice)
    return region
