"""Matrix products with packed weights, against exact products."""

from itertools import pairwise

import pytest
import torch

from tests.kernels.helpers import SPACING, assert_rounds_alike, strided_rows
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("level")
DTYPES = (torch.float32, torch.bfloat16)


def assert_exact_product(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Right up to one rounding of the result and float32 sums; the error scales with the terms, not with the sum."""
    exact = x.double() @ weight.double().t()
    terms = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    assert actual.dtype == x.dtype
    assert actual.shape == exact.shape
    allowed = exact.abs() * SPACING[x.dtype] / 2 * 1.01 + terms * 1e-6
    assert ((actual.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [*range(18), 24, 25, 31, 32, 33, 48, 49, 61, 70])
@pytest.mark.parametrize("with_bias", [True, False])
def test_any_number_of_rows(dtype, rows, with_bias):
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(70, 48).to(dtype)
    bias = torch.randn(70).to(dtype) if with_bias else None
    assert_exact_product(ops.linear(x, ops.pack_linear(weight), 70, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 16, 31, 32, 33, 64, 100, 257])
@pytest.mark.parametrize("k", [2, 30, 64, 577, 1000])
def test_any_size_of_matrix(dtype, n, k):
    k -= k % 2 if dtype == torch.bfloat16 else 0
    x, weight, bias = torch.randn(5, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    assert_exact_product(ops.linear(x, ops.pack_linear(weight), n, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(), (32, 64), (1,), (31, 33), (5, 6, 69), (40,)])
def test_a_matrix_can_be_packed_piece_by_piece(dtype, cuts):
    weight = torch.randn(70, 48).to(dtype)
    expected = ops.pack_linear(weight)
    packed = torch.zeros_like(expected)
    pieces = list(pairwise([0, *cuts, 70]))
    for first, end in pieces[::-1]:
        ops.pack_linear_rows(packed, first, weight[first:end])
    ops.pack_linear_rows(packed, 3, weight[3:3])
    assert torch.equal(packed, expected)


def test_rows_that_do_not_belong_to_a_packed_matrix_are_refused():
    packed, bf16 = ops.pack_linear(torch.zeros(40, 8)), torch.bfloat16
    for first, rows in (
        (-1, torch.zeros(2, 8)), (63, torch.zeros(2, 8)), (0, torch.zeros(2, 9)), (0, torch.zeros(8)),
        (0, torch.zeros(2, 8, dtype=bf16)), (0, torch.zeros(40, 8, dtype=bf16)), (0, torch.zeros(8, 40).t()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="pack_linear"):
            ops.pack_linear_rows(packed, first, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart_and_leading_axes_are_kept(dtype):
    weight = torch.randn(40, 34).to(dtype)
    packed = ops.pack_linear(weight)
    x = strided_rows(13, 34, dtype)
    assert_exact_product(ops.linear(x, packed, 40, None), x, weight, None)
    x = torch.randn(2, 3, 34).to(dtype)
    assert_exact_product(ops.linear(x, packed, 40, None), x, weight, None)
    x = torch.randn(34, 9).to(dtype).t()
    assert_exact_product(ops.linear(x, packed, 40, None), x, weight, None)
    x = torch.randn(34).to(dtype)
    assert_exact_product(ops.linear(x, packed, 40, None), x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_alone_and_in_company(dtype):
    x, weight, bias = torch.randn(50, 210).to(dtype), torch.randn(75, 210).to(dtype), torch.randn(75).to(dtype)
    x[7] *= 1e-38  # denormal products
    packed = ops.pack_linear(weight)
    together = ops.linear(x, packed, 75, bias)
    for r in range(50):
        for company in (1, 4, 5):
            rows = slice(r, r + company)
            assert torch.equal(ops.linear(x[rows], packed, 75, bias)[0], together[r])


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_and_strides(seed):
    random = torch.Generator().manual_seed(seed)
    rows, n, k = (int(torch.randint(1, most, (), generator=random)) for most in (71, 200, 150))
    for dtype in DTYPES:
        width = k + k % 2 if dtype == torch.bfloat16 else k
        x, weight = strided_rows(rows, width, dtype, gap=seed % 4), torch.randn(n, width).to(dtype)
        bias = torch.randn(n).to(dtype) if seed % 2 else None
        assert_exact_product(ops.linear(x, ops.pack_linear(weight), n, bias), x, weight, bias)


@pytest.mark.parametrize("k", [2, 30, 64, 98])
def test_nothing_behind_the_inputs_and_weights_is_read(k):
    """What lies there is NaN, which would show."""
    x = strided_rows(37, k, torch.bfloat16)
    weight = torch.randn(33, k).bfloat16()
    packed = ops.pack_linear(weight)
    memory = torch.full((packed.numel() + 4096,), float("nan"), dtype=torch.bfloat16)
    memory[: packed.numel()] = packed.flatten()
    assert_exact_product(ops.linear(x, memory[: packed.numel()].view_as(packed), 33, None), x, weight, None)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 500, 64), (200, 40, 64), (77, 300, 32), (300, 70, 2600)])
def test_the_number_of_threads_changes_no_bit(dtype, rows, n, k):
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    results = []
    for threads in (1, 2, 5):
        ops.set_num_threads(threads)
        results.append(ops.linear(x, ops.pack_linear(weight), n, None))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_keeps_every_number_and_fills_up_with_zeros(dtype):
    weight = torch.randn(70, 10).to(dtype)
    packed = ops.pack_linear(weight)
    assert packed.numel() == 96 * 10
    assert torch.equal(ops.packed_rows(packed, torch.arange(70)), weight)
    assert not ops.packed_rows(packed, torch.arange(70, 96)).any()
    picked = torch.tensor([69, 0, 33, 33])
    assert torch.equal(ops.packed_rows(packed, picked), weight[picked])
    assert ops.packed_rows(packed, torch.empty(0, dtype=torch.int64)).shape == (0, 10)


@pytest.mark.parametrize(
    ("weight", "can"),
    [
        (torch.zeros(3, 5), True),
        (torch.zeros(3, 4, dtype=torch.bfloat16), True),
        (torch.zeros(3, 5, dtype=torch.bfloat16), False),
        (torch.zeros(3, 4, dtype=torch.float16), False),
        (torch.zeros(4), False),
        (torch.zeros(2, 2, 2), False),
    ],
)
def test_what_can_be_packed(weight, can):
    assert ops.can_pack_linear(weight) is can
    if not can:
        with pytest.raises(ValueError, match="pack_linear"):
            ops.pack_linear(weight)


def test_nan_in_a_row_stays_in_it():
    x, packed = torch.randn(13, 8), ops.pack_linear(torch.randn(40, 8))
    x[4, 3] = float("nan")
    nan = ops.linear(x, packed, 40, None).isnan()
    assert nan[4].all()
    assert nan.sum() == 40


def test_bfloat16_products_can_come_out_unrounded() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    out = ops.linear(x, ops.pack_linear(weight), 40, None, torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)


def exact_sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    sums = x.double() @ weight.double().t()
    return sums if bias is None else sums + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 16, 33])
@pytest.mark.parametrize("half", [32, 96])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gate_and_up_in_one_product(dtype, rows, half, activation, with_bias):
    x, weight = torch.randn(rows, 34).to(dtype), torch.randn(2 * half, 34).to(dtype)
    bias = torch.randn(2 * half).to(dtype) if with_bias else None
    out = ops.gated_linear(x, ops.pack_linear(weight), 2 * half, bias, activation)
    assert_rounds_alike(out, reference.gated_linear(x, weight, 2 * half, bias, activation), loss=3e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate_and_up_may_share_a_tile_of_weights(dtype, activation):
    x, weight = torch.randn(7, 34).to(dtype), torch.randn(80, 34).to(dtype)
    out = ops.gated_linear(x, ops.pack_linear(weight), 80, None, activation)
    expected = reference.gated_linear(x, weight, 80, None, activation)
    loss = {torch.float32: 3e-5, torch.bfloat16: 2**-6}[dtype]  # gate and up are rounded in between
    torch.testing.assert_close(out.float(), expected.float(), rtol=loss, atol=4 * loss)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit_of_a_fused_product(dtype):
    x, weight = torch.randn(150, 64).to(dtype), torch.randn(128, 64).to(dtype)
    packed = ops.pack_linear(weight)
    results = []
    for threads in (1, 3):
        ops.set_num_threads(threads)
        results.append(ops.gated_linear(x, packed, 128, None, "silu"))
    assert torch.equal(results[0], results[1])


def test_wrong_halves_and_activations_are_refused():
    x, packed = torch.randn(3, 8), ops.pack_linear(torch.randn(65, 8))
    with pytest.raises(ValueError, match="halves"):
        ops.gated_linear(x, packed, 65, None, "silu")
    with pytest.raises(ValueError, match="tanhshrink"):
        ops.gated_linear(x, packed, 64, None, "tanhshrink")
