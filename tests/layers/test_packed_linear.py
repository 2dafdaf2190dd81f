"""Matrices packed as they are read hold the numbers of the checkpoint, wherever tiles and chunks end."""

import pytest
import torch

from vllm_clone.errors import ModelLoadError
from vllm_clone.layers import packed_linear
from vllm_clone.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from vllm_clone.layers.options import BuildOptions, TensorParallel
from vllm_clone.layers.packed_linear import PackedLinearMethod


def options(dtype: torch.dtype, tp: TensorParallel | None = None) -> BuildOptions:
    return BuildOptions(dtype, torch.device("cpu"), PackedLinearMethod(), max_positions=64, tp=tp or TensorParallel())


@pytest.fixture(params=[32 * 8 * 2, 4 << 20], ids=["chunks of a tile", "one chunk"], autouse=True)
def _chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_CHUNK_BYTES", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(32, 32), (31, 33), (1, 2), (5, 100), (96, 7), (70, 1)])
@pytest.mark.parametrize("order", [1, -1])
def test_stacked_matrices_arrive_in_any_order(dtype: torch.dtype, sizes: tuple[int, int], order: int) -> None:
    parts = {name: torch.randn(rows, 8).to(dtype) for name, rows in zip("ab", sizes, strict=True)}
    layer = MergedColumnParallelLinear(8, dict(zip("ab", sizes, strict=True)), bias=False, options=options(dtype))
    for name in sorted(parts)[::order]:
        layer.load_weight("weight", parts[name], name)
    layer.prepare()
    assert layer.pending() == []
    whole = torch.cat(list(parts.values()))
    assert torch.equal(layer.matrix(), whole)
    x = torch.randn(3, 8).to(dtype)
    torch.testing.assert_close(layer(x), (x.float() @ whole.float().T).to(dtype))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_packs_its_rows_or_columns_only(rank: int) -> None:
    weight, tp = torch.randn(80, 16), TensorParallel(rank, 2, lambda x: x, lambda x: x)
    rows = ColumnParallelLinear(16, 80, bias=False, options=options(torch.float32, tp))
    columns = RowParallelLinear(16, 80, bias=False, options=options(torch.float32, tp))
    for layer in (rows, columns):
        layer.load_weight("weight", weight)
    assert torch.equal(rows.matrix(), weight.chunk(2)[rank])
    assert torch.equal(columns.matrix(), weight.chunk(2, 1)[rank])


def test_other_dtypes_and_layouts_are_converted_on_the_way() -> None:
    layer = ColumnParallelLinear(8, 100, bias=False, options=options(torch.bfloat16))
    weight = torch.randn(8, 100)
    layer.load_weight("weight", weight.t())
    assert torch.equal(layer.matrix(), weight.t().bfloat16())


def test_the_matrix_exists_once() -> None:
    layer = ColumnParallelLinear(8, 64, bias=False, options=options(torch.float32))
    before = layer.weight.data_ptr()
    layer.load_weight("weight", torch.randn(64, 8))
    layer.prepare()
    assert layer.weight.data_ptr() == before
    assert layer.weight.nbytes == 64 * 8 * 4


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(64, 9), r"expected shape .*64, 8.*found .*64, 9"),
        (torch.zeros(65, 8), r"expected shape .*64, 8.*found .*65, 8"),
        (torch.zeros(64), "expected shape"),
        (torch.zeros(64, 8, dtype=torch.int8), "expected a plain floating-point dtype, found int8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(tensor: torch.Tensor, message: str) -> None:
    layer = ColumnParallelLinear(8, 64, bias=False, options=options(torch.float32))
    with pytest.raises(ModelLoadError, match=message):
        layer.load_weight("weight", tensor)
    assert layer.pending() == [("weight", None)]
