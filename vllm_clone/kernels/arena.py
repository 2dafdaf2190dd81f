"""Memory in huge pages, and tensors carved out of it."""

import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch

_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_SLAB_BYTES = 32 << 20


def huge_pages(num_bytes: int) -> np.ndarray:
    """Zeroed memory, uint8, in huge pages where the system has them; pages come into being when first touched.

    Streaming through ordinary pages costs a walk of the page tables every 4 KiB, and in a virtual machine that walk is
    so long that it halves the bandwidth.
    """
    size = num_bytes + -num_bytes % _HUGE_PAGE
    mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % _HUGE_PAGE
    if num_bytes >= _HUGE_PAGE:
        # A kernel without huge pages refuses; ordinary ones do as well.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE, start, size)
    return memory[start : start + num_bytes]


class Arena:
    """A first-fit allocator of tensors. A tensor's place is free again when its last view is gone.

    Weights live in one, side by side, because a single matrix is often smaller than a huge page. The intermediates of
    a recorded step live in another: a recorded call runs long after its tensors are gone, on addresses that later
    calls of the same recording used for other tensors, which is right in the recorded order as it was when the calls
    were made.
    """

    def __init__(self) -> None:
        self._slabs: list[np.ndarray] = []
        self._holes: list[list[tuple[int, int]]] = []
        """Per slab the free ranges, in ascending order."""
        self._returned: deque[tuple[int, int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Address space held; what was never touched costs no memory."""
        return sum(slab.nbytes for slab in self._slabs)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor. May be called from any thread."""
        count = 1
        for size in shape:
            count *= size
        num_bytes = count * dtype.itemsize
        with self._lock:
            place = self._take(max(num_bytes + -num_bytes % _ALIGNMENT, _ALIGNMENT))
        return torch.from_numpy(place)[:num_bytes].view(dtype).view(shape)

    def _take(self, size: int) -> np.ndarray:
        while self._returned:
            self._merge(*self._returned.popleft())
        for index, holes in enumerate(self._holes):
            for i, (start, end) in enumerate(holes):
                if end - start >= size:
                    holes[i : i + 1] = [(start + size, end)] if end - start > size else []
                    return self._place(index, start, start + size)
        whole = max(size, _SLAB_BYTES)
        self._slabs.append(huge_pages(whole))
        self._holes.append([(size, whole)] if whole > size else [])
        return self._place(len(self._slabs) - 1, 0, size)

    def _place(self, slab: int, start: int, end: int) -> np.ndarray:
        # torch keeps this array until no tensor uses its memory any more. What is given back then waits in a queue:
        # that may happen at any point of any thread, also while this one holds the lock.
        place = self._slabs[slab][start:end]
        weakref.finalize(place, self._returned.append, (slab, start, end)).atexit = False
        return place

    def _merge(self, slab: int, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._holes[slab], (start, end)]):
            if merged and merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], hole[1])
            else:
                merged.append(hole)
        self._holes[slab] = merged
