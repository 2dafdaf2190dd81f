"""Sums, scales and rows of matrices."""

import pytest
import torch

from tests.kernels.helpers import DTYPES, assert_rounds_alike, strided_rows
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("level")
SHAPES = [(0, 8), (1, 1), (3, 17), (5, 1000), (70, 600)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_and_scale(dtype, shape):
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    expected = x + y
    ops.add_(x, y)
    assert_rounds_alike(x, expected)
    expected = x * 1.7
    ops.scale_(x, 1.7)
    assert_rounds_alike(x, expected)


def test_scaling_keeps_infinities():
    x = torch.full((2, 20), torch.inf)
    ops.scale_(x, -2.0)
    assert (x == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_activations(dtype, shape):
    x = (torch.randn(shape) * 4).to(dtype)
    assert_rounds_alike(ops.silu(x), reference.silu(x), loss=1e-5)
    assert torch.equal(ops.relu(x), reference.relu(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 34, 576])
def test_rows_of_a_matrix(dtype, width):
    matrix = torch.randn(70, width).to(dtype)
    rows = torch.tensor([69, 0, 31, 32, 31])
    assert torch.equal(ops.embedding(matrix, rows), matrix[rows])
    assert torch.equal(ops.embedding(matrix, rows, torch.float32), matrix[rows].float())
    assert ops.embedding(matrix, rows[:0]).shape == (0, width)
    if dtype != torch.float16:
        packed = ops.pack_linear(matrix)
        assert torch.equal(ops.packed_rows(packed, rows), matrix[rows])
        assert torch.equal(ops.packed_rows(packed, rows, torch.float32), matrix[rows].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3])
def test_heads_are_normalised_in_place(dtype, heads):
    x, weight = strided_rows(4, heads * 24, dtype), torch.randn(24).to(dtype)
    expected = x.clone()
    reference.rms_norm_heads_(expected, weight, 1e-5, weight_offset=1.0)
    ops.rms_norm_heads_(x, weight, 1e-5, weight_offset=1.0)
    assert_rounds_alike(x, expected)


def test_wrong_arguments_are_refused():
    x = torch.ones(4, 6)
    with pytest.raises(ValueError, match="must agree"):
        ops.add_(x, torch.ones(4, 5))
    with pytest.raises(ValueError, match="contiguous rows"):
        ops.scale_(x.t(), 2.0)
    with pytest.raises(ValueError, match="int64"):
        ops.embedding(x, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="whole heads"):
        ops.rms_norm_heads_(x, torch.ones(4), 1e-5)
