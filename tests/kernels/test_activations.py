"""Activations, gated and plain."""

import pytest
import torch

from tests.kernels.helpers import DTYPES, assert_rounds_alike, strided_rows
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("level")
SHAPES = [(0, 8), (1, 1), (3, 17), (2, 64), (5, 1000), (2, 3, 24)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_and_mul(dtype, shape):
    x = (torch.randn(*shape[:-1], 2 * shape[-1]) * 4).to(dtype)
    assert_rounds_alike(ops.silu_and_mul(x), reference.silu_and_mul(x), loss=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_with_and_without_gate(dtype, shape, approximate):
    gated = (torch.randn(*shape[:-1], 2 * shape[-1]) * 3).to(dtype)
    plain = gated[..., : shape[-1]].contiguous()
    expected = reference.gelu_and_mul(gated, approximate=approximate)
    assert_rounds_alike(ops.gelu_and_mul(gated, approximate=approximate), expected, loss=1e-5)
    expected = reference.gelu(plain, approximate=approximate)
    assert_rounds_alike(ops.gelu(plain, approximate=approximate), expected, loss=1e-5)


def test_rows_may_lie_apart():
    x = strided_rows(4, 38, torch.float32)
    assert_rounds_alike(ops.silu_and_mul(x), reference.silu_and_mul(x), loss=1e-5)
    assert_rounds_alike(ops.gelu(x, approximate="tanh"), reference.gelu(x, approximate="tanh"), loss=1e-5)


@pytest.mark.parametrize("kernel", ["silu", "none", "tanh"])
def test_large_inputs_neither_overflow_nor_vanish(kernel):
    gate = torch.tensor([-1e4, -200.0, -90.0, -30.0, -0.0, 0.0, 1e-30, 30.0, 90.0, 200.0, 1e4, 1e38])
    x = torch.cat([gate, torch.ones_like(gate)])[None]
    if kernel == "silu":
        actual, expected = ops.silu_and_mul(x), reference.silu_and_mul(x)
    else:
        actual, expected = (m.gelu_and_mul(x, approximate=kernel) for m in (ops, reference))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-10)


def test_nan_comes_out_as_nan():
    x = torch.tensor([[float("nan"), 1.0, 1.0, 1.0]])
    for y in (ops.silu_and_mul(x), *(ops.gelu_and_mul(x, approximate=a) for a in ("none", "tanh"))):
        assert y.isnan().tolist() == [[True, False]]
