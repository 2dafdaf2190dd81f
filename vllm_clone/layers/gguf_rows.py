"""A matrix in the bits of a GGUF file."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_clone import kernels
from vllm_clone.errors import ModelLoadError
from vllm_clone.hub.gguf import BLOCK_SIZES, GGMLType


@dataclass(frozen=True, slots=True)
class GGUFRows:
    """A matrix [N, K] stored row by row in blocks.

    Args:
        data: uint8 [N, bytes of a row]; may be a view of the mapped file.
        ggml_type: how a block holds its numbers.
        width: K, a whole number of blocks.
    """

    data: np.ndarray
    ggml_type: GGMLType
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return len(self.data), self.width

    def split(self, sizes: list[int]) -> list["GGUFRows"]:
        """Matrices of ``sizes`` rows each, top to bottom."""
        cuts = np.cumsum(sizes)[:-1]
        return [GGUFRows(rows, self.ggml_type, self.width) for rows in np.split(self.data, cuts)]

    def part(self, rows: slice, columns: slice) -> "GGUFRows":
        """A sub-matrix. Raises ModelLoadError when ``columns`` would cut a block in two."""
        per_block, block_bytes = BLOCK_SIZES[self.ggml_type]
        if columns.start % per_block or columns.stop % per_block:
            raise ModelLoadError(
                f"a rank's share, inputs {columns.start} to {columns.stop}, cuts through {self.ggml_type.name} blocks "
                f"of {per_block}; use a smaller tensor parallel size"
            )
        first, end = (edge // per_block * block_bytes for edge in (columns.start, columns.stop))
        return GGUFRows(self.data[rows, first:end], self.ggml_type, columns.stop - columns.start)

    def unpermute(self, num_heads: int) -> "GGUFRows":
        """Undo the converter's pairing of rows (i, i + half) of each head as neighbours."""
        rows = self.data.reshape(num_heads, -1, 2, self.data.shape[1]).swapaxes(1, 2)
        return GGUFRows(rows.reshape(self.data.shape), self.ggml_type, self.width)

    def bytes(self) -> memoryview:
        """The rows' bytes, one row after the other."""
        return np.ascontiguousarray(self.data).data

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix as [N, K] in ``dtype``. Raises ModelLoadError for a type nobody here can read."""
        return dequantize(self.bytes(), self.ggml_type, self.shape, dtype)


def dequantize(data: memoryview, ggml_type: GGMLType, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A GGUF tensor's bytes as numbers; types without a kernel of ours go through the gguf package's numpy code.

    Raises:
        ModelLoadError: the gguf package is needed and missing, or does not know the type either.
    """
    if ggml_type in kernels.DEQUANTIZABLE:
        return kernels.dequantize_gguf(data, ggml_type, shape, dtype)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as gguf_dequantize
    except ImportError:
        raise ModelLoadError(
            f"storage type {ggml_type.name} needs the gguf package (pip install 'vllm-clone[gguf]')"
        ) from None
    try:
        values = gguf_dequantize(np.frombuffer(data, np.uint8), GGMLQuantizationType(int(ggml_type)))
    except (NotImplementedError, ValueError) as error:
        raise ModelLoadError(f"storage type {ggml_type.name} cannot be read: {error}") from error
    return torch.from_numpy(values).reshape(shape).to(dtype)
