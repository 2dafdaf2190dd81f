"""Products with matrices in GGUF bits, against the gguf package's numbers."""

import gguf
import pytest
import torch

from tests.kernels.test_dequantize import blocks_of
from vllm_clone.hub.gguf import BLOCK_SIZES, GGMLType
from vllm_clone.kernels import GGUFMatrix, reference
from vllm_clone.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("level")
TYPES = [gguf.GGMLQuantizationType(t) for t in sorted(ops.GGUF_PACKABLE)]
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILED_ROWS = 10  # rows of bfloat16 from which matrix tiles, if there are any, take weights rounded to bfloat16


def matrix(kind: gguf.GGMLQuantizationType, rows: int, blocks: int) -> tuple[memoryview, torch.Tensor]:
    """Raw bytes and the float32 matrix they hold."""
    raw, shape = blocks_of(kind, rows, blocks)
    return memoryview(raw.tobytes()), torch.from_numpy(gguf.quants.dequantize(raw, kind).copy()).reshape(shape)


def numbers_of_8_bits(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Inputs that no rounding changes: whole numbers up to 127, which is there, times a power of two per group."""
    x = torch.randint(-127, 128, (rows, width // 32, 32)).float()
    x[..., 3] = 127
    return (x * 2.0 ** -torch.randint(3, 9, (rows, width // 32, 1))).flatten(1).to(dtype)


def allowed(x: torch.Tensor, weight: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """Float32 rounding of a sum's terms (bfloat16's of its weights by tiles), and 2⁻¹¹ of a weight's parts where scales
    were rounded to half."""
    terms = x.float().abs() @ weight.abs().T
    if x.dtype == torch.bfloat16 and len(x) >= TILED_ROWS and "amx" in ops.active_level():
        terms = terms * 2**-8 / 2e-6
    parts = x.float().abs().sum(-1, keepdim=True) * weight.abs().max() if kind.name in K_TYPES else 0.0
    return 2e-6 * terms + 2**-10 * parts + 1e-6


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 1), (1, 48), (3, 17), (7, 40), (8, 16), (21, 33), (70, 16)])
def test_the_product_is_that_of_the_matrix(kind, dtype, rows, outputs):
    data, weight = matrix(kind, outputs, 3)
    x = numbers_of_8_bits(rows, weight.shape[1], dtype)
    bias = torch.randn(outputs).to(dtype) if outputs % 2 else None
    packed = ops.pack_gguf_linear(data, int(kind), weight.shape)
    actual = ops.gguf_linear(x, [GGUFMatrix(packed, int(kind), outputs)], bias)
    assert actual.dtype == dtype
    expected = reference.gguf_linear(x, [GGUFMatrix(weight, int(kind), outputs)], bias, torch.float32)
    spacing = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert torch.all((actual.float() - expected).abs() <= allowed(x, weight, kind) + spacing * expected.abs())


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_any_inputs_are_rounded_to_16_bits(kind):
    data, weight = matrix(kind, 16, 3)
    x = torch.randn(5, weight.shape[1])
    packed = ops.pack_gguf_linear(data, int(kind), weight.shape)
    error = (ops.gguf_linear(x, [GGUFMatrix(packed, int(kind), 16)], None) - x @ weight.T).abs()
    half_step = x.unflatten(1, (-1, 32)).abs().amax(-1) / 32512 / 2
    rounding = half_step @ weight.unflatten(1, (-1, 32)).abs().sum(-1).T
    assert torch.all(error <= 1.001 * rounding + allowed(x, weight, kind))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_rows_come_back_as_the_numbers_that_gguf_says(kind):
    data, weight = matrix(kind, 37, 2)
    packed = ops.pack_gguf_linear(data, int(kind), weight.shape)
    ids = torch.tensor([36, 0, 5, 5, 16])
    rows = ops.gguf_rows(packed, int(kind), weight.shape[1], ids, torch.float32)
    loss = 2**-11 if kind.name in K_TYPES else 0.0
    torch.testing.assert_close(rows, weight[ids], rtol=1e-6, atol=loss * weight.abs().max().item() * 2 + 1e-6)


def test_one_row_more_or_less_changes_no_answer():
    kind = gguf.GGMLQuantizationType.Q4_1
    data, weight = matrix(kind, 64, 18)
    packed = ops.pack_gguf_linear(data, int(kind), weight.shape)
    x = torch.randn(29, weight.shape[1]).bfloat16()
    x = x[: TILED_ROWS - 1] if "amx" in ops.active_level() else x
    together = ops.gguf_linear(x, [GGUFMatrix(packed, int(kind), 64)], None)
    alone = torch.cat([ops.gguf_linear(row[None], [GGUFMatrix(packed, int(kind), 64)], None) for row in x])
    assert torch.equal(together, alone)


def test_strided_rows_leading_axes_float32_outputs_and_no_rows():
    kind = gguf.GGMLQuantizationType.Q8_0
    data, weight = matrix(kind, 16, 2)
    packed = ops.pack_gguf_linear(data, int(kind), weight.shape)
    wide = torch.randn(4, 100).bfloat16()
    x = wide[:, 20:84]
    plain = ops.gguf_linear(x.contiguous(), [GGUFMatrix(packed, int(kind), 16)], None)
    assert torch.equal(ops.gguf_linear(x, [GGUFMatrix(packed, int(kind), 16)], None), plain)
    assert torch.equal(
        ops.gguf_linear(x.reshape(2, 2, 64), [GGUFMatrix(packed, int(kind), 16)], None), plain.view(2, 2, 16)
    )
    exact = ops.gguf_linear(x, [GGUFMatrix(packed, int(kind), 16)], None, torch.float32)
    assert exact.dtype == torch.float32
    assert torch.equal(exact.bfloat16(), plain)
    assert ops.gguf_linear(x[:0], [GGUFMatrix(packed, int(kind), 16)], None).shape == (0, 16)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_input_breaks_its_own_row_alone(poison):
    kind = gguf.GGMLQuantizationType.Q4_0
    data, weight = matrix(kind, 16, 2)
    packed = ops.pack_gguf_linear(data, int(kind), weight.shape)
    x = torch.randn(3, 64)
    x[1, 40] = poison
    out = ops.gguf_linear(x, [GGUFMatrix(packed, int(kind), 16)], None)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_zero_inputs_give_the_bias():
    kind = gguf.GGMLQuantizationType.Q4_1
    data, weight = matrix(kind, 16, 2)
    packed = ops.pack_gguf_linear(data, int(kind), weight.shape)
    bias = torch.randn(16)
    assert torch.equal(ops.gguf_linear(torch.zeros(1, 64), [GGUFMatrix(packed, int(kind), 16)], bias)[0], bias)


def test_wrong_types_shapes_and_lengths_are_refused():
    data, weight = matrix(gguf.GGMLQuantizationType.Q4_0, 16, 2)
    packed = ops.pack_gguf_linear(data, 2, weight.shape)
    x = torch.randn(1, 64)
    with pytest.raises(ValueError, match="storage type 10 has no product"):
        ops.pack_gguf_linear(data, 10, (16, 64))
    with pytest.raises(ValueError, match="no whole number of blocks"):
        ops.pack_gguf_linear(data, 2, (16, 63))
    with pytest.raises(ValueError, match="bytes expected"):
        ops.pack_gguf_linear(data[:-1], 2, (16, 64))
    with pytest.raises(ValueError, match="another type or shape"):
        ops.gguf_linear(x, [GGUFMatrix(packed, 3, 16)], None)
    with pytest.raises(ValueError, match="another type or shape"):
        ops.gguf_linear(x, [GGUFMatrix(packed, 2, 33)], None)
    with pytest.raises(ValueError, match="one number per output"):
        ops.gguf_linear(x, [GGUFMatrix(packed, 2, 16)], torch.zeros(15))
    with pytest.raises(ValueError, match="has x's dtype or is float32"):
        ops.gguf_linear(x, [GGUFMatrix(packed, 2, 16)], None, torch.bfloat16)


def test_by_tiles_one_row_more_or_less_changes_no_answer():
    kind = gguf.GGMLQuantizationType.Q4_1
    data, weight = matrix(kind, 80, 18)
    matrices = [GGUFMatrix(ops.pack_gguf_linear(data, int(kind), weight.shape), int(kind), 80)]
    x = torch.randn(45, weight.shape[1]).bfloat16()
    assert torch.equal(ops.gguf_linear(x, matrices, None)[:TILED_ROWS], ops.gguf_linear(x[:TILED_ROWS], matrices, None))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_many_rows_of_a_wide_matrix(kind):
    data, weight = matrix(kind, 80, 2048 // BLOCK_SIZES[GGMLType(int(kind))][0])
    x = numbers_of_8_bits(600, weight.shape[1], torch.bfloat16)  # more than the cache holds at a time
    actual = ops.gguf_linear(
        x, [GGUFMatrix(ops.pack_gguf_linear(data, int(kind), weight.shape), int(kind), 80)], None, torch.float32
    )
    assert torch.all((actual - x.float() @ weight.T).abs() <= allowed(x, weight, kind))
