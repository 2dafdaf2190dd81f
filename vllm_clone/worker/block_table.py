"""Which physical blocks hold each row's tokens, for one KV cache group. R rows, B blocks per row, T tokens."""

import numpy as np

_FIRST_WIDTH = 16


class BlockTable:
    """Block ids by batch row, in sequence order. Columns are added as sequences grow, so memory follows use."""

    def __init__(self, max_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self._ids = np.zeros((max_rows, _FIRST_WIDTH), np.int32)
        self._lengths = [0] * max_rows

    def set(self, row: int, block_ids: list[int]) -> None:
        """Replace a row's blocks."""
        self._lengths[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: list[int]) -> None:
        """Add blocks at the end of a row."""
        start = self._lengths[row]
        end = start + len(block_ids)
        if end > self._ids.shape[1]:
            self._widen(end)
        self._ids[row, start:end] = block_ids
        self._lengths[row] = end

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        length = self._lengths[source]
        self._ids[target, :length] = self._ids[source, :length]
        self._lengths[target] = length

    def gather(self, rows: np.ndarray | slice, max_seq_len: int) -> np.ndarray:
        """A contiguous table of some rows, int32 [R, B], as wide as ``max_seq_len`` tokens need."""
        return np.ascontiguousarray(self._ids[rows, : -(-max_seq_len // self.block_size)])

    def slots(self, row_T: np.ndarray, position_T: np.ndarray) -> np.ndarray:
        """Where each token's key and value go: block id × block size + offset, int64 [T]."""
        block_T, offset_T = np.divmod(position_T, self.block_size)
        return self._ids[row_T, block_T].astype(np.int64) * self.block_size + offset_T

    def _widen(self, needed: int) -> None:
        rows, width = self._ids.shape
        wider = np.zeros((rows, max(needed, 2 * width)), np.int32)
        wider[:, :width] = self._ids
        self._ids = wider
