"""GGUF storage types, against the numpy code of the gguf package."""

import gguf
import numpy as np
import pytest
import torch

from vllm_clone.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("level")
TYPES = sorted(ops.DEQUANTIZABLE)
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip
"""Where in a block its float16 scales stand."""


def blocks_of(kind: gguf.GGMLQuantizationType, rows: int, blocks_per_row: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Random bytes with scales a model could have, and the shape of what they hold."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    count = rows * blocks_per_row
    raw = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    if kind.name in ("F32", "F16", "BF16"):
        numbers = torch.from_numpy(rng.standard_normal(count).astype(np.float32))
        raw = numbers.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name])
        raw = raw.view(torch.uint8).numpy().reshape(count, block_bytes)
    for at in SCALES.get(kind.name, ()):
        raw[:, at : at + 2] = rng.normal(0, 0.05, count).astype(np.float16).view(np.uint8).reshape(count, 2)
    return raw.reshape(rows, -1), (rows, blocks_per_row * per_block)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType(t) for t in TYPES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_become_the_numbers_that_gguf_says(kind, dtype):
    raw, shape = blocks_of(kind, 5, 29)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy()).reshape(shape)
    actual = ops.dequantize_gguf(memoryview(raw.tobytes()), int(kind), shape, dtype)
    assert actual.dtype == dtype
    rtol, atol = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (2**-8, 1e-6), torch.float16: (2**-11, 1e-6)}[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=rtol, atol=atol)


def test_bytes_may_come_as_a_tensor_too_and_may_go_on_behind_the_matrix():
    kind = gguf.GGMLQuantizationType.Q8_0
    raw, shape = blocks_of(kind, 2, 3)
    plain = ops.dequantize_gguf(memoryview(raw.tobytes()), int(kind), shape, torch.float32)
    longer = torch.from_numpy(np.concatenate([raw.reshape(-1), np.zeros(7, np.uint8)]))
    assert torch.equal(ops.dequantize_gguf(longer, int(kind), shape, torch.float32), plain)


def test_a_scalar_and_an_empty_matrix():
    value = np.float32(2.5).tobytes()
    assert ops.dequantize_gguf(memoryview(value), 0, (), torch.float32).item() == 2.5
    assert ops.dequantize_gguf(memoryview(b"\0" * 4), 8, (0, 32), torch.float32).shape == (0, 32)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType(t) for t in TYPES], ids=lambda kind: kind.name)
def test_missing_bytes_are_refused(kind):
    raw, shape = blocks_of(kind, 2, 3)
    with pytest.raises(ValueError, match=f"{raw.size} bytes expected, {raw.size - 1} given"):
        ops.dequantize_gguf(memoryview(raw.tobytes())[:-1], int(kind), shape, torch.float32)


@pytest.mark.parametrize(
    ("ggml_type", "shape", "match"),
    [
        (8, (2, 33), "whole number of blocks of 32"),
        (12, (512, 1), "whole number of blocks of 256"),
        (10, (1, 256), "storage type 10 has no kernel"),
        (999, (1, 256), "storage type 999 has no kernel"),
    ],
)
def test_what_it_does_not_know_is_refused(ggml_type, shape, match):
    with pytest.raises(ValueError, match=match):
        ops.dequantize_gguf(memoryview(b"\0" * 4096), ggml_type, shape, torch.float32)
