"""Memory for the intermediates of recorded steps: it is reused by lifetime and never given back to the system."""

import weakref

import numpy as np
import torch

_ALIGNMENT = 64
_SLAB_BYTES = 4 << 20


class Arena:
    """A first-fit allocator of tensors. A tensor's place is free again when its last view is gone.

    A recorded call runs long after its tensors are gone, on addresses that later calls of the same recording used for
    other tensors: in the recorded order that is right, as it was when the calls were made.
    """

    def __init__(self) -> None:
        self._slabs: list[np.ndarray] = []
        self._holes: list[list[tuple[int, int]]] = []
        """Per slab the free ranges, in ascending order."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(slab.nbytes for slab in self._slabs)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor."""
        count = 1
        for size in shape:
            count *= size
        num_bytes = count * dtype.itemsize
        place = self._take(max(num_bytes + -num_bytes % _ALIGNMENT, _ALIGNMENT))
        return torch.from_numpy(place)[:num_bytes].view(dtype).view(shape)

    def _take(self, size: int) -> np.ndarray:
        for index, holes in enumerate(self._holes):
            for i, (start, end) in enumerate(holes):
                if end - start >= size:
                    holes[i : i + 1] = [(start + size, end)] if end - start > size else []
                    return self._place(index, start, start + size)
        whole = max(size, _SLAB_BYTES)
        raw = np.empty(whole + _ALIGNMENT, np.uint8)
        aligned = -raw.ctypes.data % _ALIGNMENT
        self._slabs.append(raw[aligned : aligned + whole])
        self._holes.append([(size, whole)] if whole > size else [])
        return self._place(len(self._slabs) - 1, 0, size)

    def _place(self, slab: int, start: int, end: int) -> np.ndarray:
        # torch keeps this array until no tensor uses its memory any more.
        place = self._slabs[slab][start:end]
        weakref.finalize(place, self._give_back, slab, start, end).atexit = False
        return place

    def _give_back(self, slab: int, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._holes[slab], (start, end)]):
            if merged and merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], hole[1])
            else:
                merged.append(hole)
        self._holes[slab] = merged
