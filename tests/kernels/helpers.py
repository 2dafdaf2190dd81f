"""What the kernel tests share: element types, tolerances and memory that shows what was not written."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPACING = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest distance of two neighbouring numbers, relative to them."""


def assert_rounds_alike(actual: torch.Tensor, expected: torch.Tensor, *, loss: float = 2e-6) -> None:
    """Neighbours in the stored type at most, after ``loss`` of float32 arithmetic."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    rtol = SPACING[actual.dtype] + loss
    torch.testing.assert_close(actual.float(), expected.float(), rtol=rtol, atol=loss, equal_nan=True)


def strided_rows(rows: int, width: int, dtype: torch.dtype, gap: int = 5) -> torch.Tensor:
    """Random [rows, width] whose rows lie further apart; between them there is NaN."""
    whole = torch.full((rows, width + gap), float("nan"), dtype=dtype)
    whole[:, :width] = torch.randn(rows, width)
    return whole[:, :width]


def empty_cache(
    blocks: int, heads: int, block_size: int, size: int, dtype: torch.dtype, *, scaled: bool = False
) -> torch.Tensor:
    """A KV cache in which every element and scale is NaN; int8 elements are −1, having none."""
    shape = (blocks, 2, heads, block_size, size + 4 * scaled)
    if dtype.itemsize > 1:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, 0xFF, dtype=torch.uint8).view(dtype)


STORED = [
    *((dtype, False) for dtype in DTYPES),
    *((torch.float8_e4m3fn, False), (torch.float8_e5m2, False), (torch.float8_e4m3fn, True), (torch.int8, True)),
]
"""What a KV cache can be made of: element type, and whether it keeps a scale per token and head."""
