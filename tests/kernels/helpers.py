"""What the kernel tests share: element types, tolerances and memory that shows what was not written."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative rounding of one stored number."""


def assert_rounds_alike(actual: torch.Tensor, expected: torch.Tensor, *, loss: float = 2e-6) -> None:
    """Equal up to one rounding of the stored type and ``loss`` of float32 arithmetic, on the scale of each number."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    rounding = ROUNDING[actual.dtype] * 1.01
    torch.testing.assert_close(actual.float(), expected.float(), rtol=rounding + loss, atol=loss, equal_nan=True)


def strided_rows(rows: int, width: int, dtype: torch.dtype, gap: int = 5) -> torch.Tensor:
    """Random [rows, width] whose rows lie further apart; between them there is NaN."""
    whole = torch.full((rows, width + gap), float("nan"), dtype=dtype)
    whole[:, :width] = torch.randn(rows, width)
    return whole[:, :width]
