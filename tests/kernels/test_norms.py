"""RMS norm, its fusion with the residual sum, layer norm."""

import pytest
import torch

from tests.kernels.helpers import DTYPES, assert_rounds_alike, strided_rows
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("level")
SHAPES = [(1, 1), (3, 15), (2, 16), (5, 17), (7, 72), (2, 576), (40, 1023)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype, rows, dim, offset):
    x, weight = torch.randn(rows, dim).to(dtype) * 3, torch.randn(dim).to(dtype)
    actual = ops.rms_norm(x, weight, 1e-5, weight_offset=offset)
    assert_rounds_alike(actual, reference.rms_norm(x, weight, 1e-5, weight_offset=offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 4, 24), (6, 0, 24), (24,)])
def test_rms_norm_takes_any_leading_axes(dtype, shape):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    assert_rounds_alike(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_reads_only_its_columns_of_wider_rows(dtype):
    x, weight = strided_rows(9, 33, dtype), torch.randn(33).to(dtype)
    actual = ops.rms_norm(x, weight, 1e-5)
    assert not actual.isnan().any()
    assert_rounds_alike(actual, reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [*SHAPES, (0, 16)])
def test_fused_add_rms_norm_updates_both_in_place(dtype, rows, dim):
    x, residual = torch.randn(rows, dim).to(dtype), torch.randn(rows, dim).to(dtype)
    weight = torch.randn(dim).to(dtype)
    expected_x, expected_residual = x.clone(), residual.clone()
    reference.fused_add_rms_norm(expected_x, expected_residual, weight, 1e-5, weight_offset=1.0)
    ops.fused_add_rms_norm(x, residual, weight, 1e-5, weight_offset=1.0)
    assert torch.equal(residual, expected_residual)
    assert_rounds_alike(x, expected_x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [*SHAPES, (0, 16)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm(dtype, rows, dim, with_bias):
    x, weight = torch.randn(rows, dim).to(dtype) + 2, torch.randn(dim).to(dtype)
    bias = torch.randn(dim).to(dtype) if with_bias else None
    assert_rounds_alike(ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5), loss=1e-5)


def test_layer_norm_of_numbers_far_from_zero_keeps_their_differences():
    x = 1000 + torch.randn(4, 300)
    weight, bias = torch.ones(300), torch.zeros(300)
    exact = torch.nn.functional.layer_norm(x.double(), (300,), eps=1e-5).float()
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-5), exact, rtol=1e-4, atol=1e-4)


def test_nan_stays_in_its_row():
    x = torch.randn(3, 20)
    x[1, 7] = float("nan")
    for y in (ops.rms_norm(x, torch.ones(20), 1e-5), ops.layer_norm(x, torch.ones(20), None, 1e-5)):
        assert y.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "dim"), SHAPES)
def test_the_residual_stream_may_be_float32(dtype, rows, dim):
    x, residual, weight = torch.randn(rows, dim).to(dtype), torch.randn(rows, dim), torch.randn(dim).to(dtype)
    assert_rounds_alike(ops.rms_norm(residual, weight, 1e-5), reference.rms_norm(residual, weight, 1e-5))
    normed = ops.layer_norm(residual, weight, weight, 1e-5)
    assert_rounds_alike(normed, reference.layer_norm(residual, weight, weight, 1e-5), loss=1e-5)
    total, stream = residual + x.float(), residual.clone()
    ops.fused_add_rms_norm(x, stream, weight, 1e-5)
    assert torch.equal(stream, total)
    assert_rounds_alike(x, reference.rms_norm(total, weight, 1e-5))
    expected = residual + x.float()
    ops.add_(residual, x)
    assert torch.equal(residual, expected)
