"""Layers that keep the bits of a GGUF file give the products of the numbers these bits stand for."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from tests.model_loader.gguf_files import random_matrix
from vllm_clone import kernels
from vllm_clone.errors import ModelLoadError
from vllm_clone.hub.gguf import GGMLType
from vllm_clone.kernels import GGUFMatrix, reference
from vllm_clone.layers.embedding import VocabParallelEmbedding
from vllm_clone.layers.gguf_linear import GGUFLinearMethod, StorageTypes
from vllm_clone.layers.gguf_rows import GGUFRows
from vllm_clone.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm_clone.layers.options import BuildOptions, TensorParallel

TOLERANCE = {"rtol": 1e-5, "atol": 1e-4}
K_TOLERANCE = {"rtol": 2e-3, "atol": 2e-2}
"""The packed form of K types rounds their scales to half precision."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def options(types: StorageTypes | None = None, rank: int = 0, size: int = 1, dtype: str = "float32") -> BuildOptions:
    tp = TensorParallel(rank, size, lambda x: x, lambda x: x) if size > 1 else TensorParallel()
    method = GGUFLinearMethod(types or StorageTypes())
    return BuildOptions(getattr(torch, dtype), torch.device("cpu"), method, max_positions=64, tp=tp)


def stored(kind: Kind, rows: int, width: int) -> tuple[GGUFRows, torch.Tensor]:
    """A random matrix as a file holds it, and its numbers."""
    raw = random_matrix(kind, rows, width)
    numbers = torch.from_numpy(quants.dequantize(raw, kind).copy()).reshape(rows, width)
    return GGUFRows(raw.view(np.uint8).reshape(rows, -1), GGMLType(int(kind)), width), numbers


def rounded_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The exact product with inputs rounded to 16 bits."""
    return reference.gguf_linear(x, [GGUFMatrix(weight, 0, len(weight))], None)


def filled(layer: LinearBase, matrices: dict[str | None, GGUFRows]) -> LinearBase:
    for shard, rows in matrices.items():
        layer.load_weight("weight", rows, shard)
    assert layer.pending() == []
    layer.prepare()
    return layer


@pytest.mark.parametrize("kind", [Kind(t) for t in sorted(kernels.GGUF_PACKABLE)], ids=lambda kind: kind.name)
def test_stacked_matrices_of_one_type_become_one_and_keep_their_bits(kind: Kind) -> None:
    gate, gate_numbers = stored(kind, 48, 256)
    up, up_numbers = stored(kind, 48, 256)
    layer = filled(
        MergedColumnParallelLinear(256, {"gate": 48, "up": 48}, bias=False, options=options()),
        {"up": up, "gate": gate},
    )
    numbers = torch.cat([gate_numbers, up_numbers])
    tolerance = K_TOLERANCE if kind.name.endswith("_K") else TOLERANCE
    x = torch.randn(5, 256)
    torch.testing.assert_close(layer(x), rounded_product(x, numbers), **tolerance)
    torch.testing.assert_close(layer.matrix(), numbers, **tolerance)
    assert [parameter.dtype for parameter in layer.parameters()] == [torch.uint8]
    assert layer.weight.nbytes < numbers.numel() * 1.2


def test_matrices_of_different_types_stay_apart_and_their_outputs_stand_side_by_side() -> None:
    parts = {"q": stored(Kind.Q4_K, 64, 256), "k": stored(Kind.Q4_K, 32, 256), "v": stored(Kind.Q6_K, 32, 256)}
    layer = QKVParallelLinear(256, 16, 4, 2, bias=True, options=options())
    bias = torch.randn(128)
    layer.load_weight("bias", bias)
    filled(layer, {shard: rows for shard, (rows, _) in parts.items()})
    numbers = torch.cat([numbers for _, numbers in parts.values()])
    x = torch.randn(2, 3, 256)
    torch.testing.assert_close(layer(x), rounded_product(x, numbers) + bias, **K_TOLERANCE)
    assert sorted(name for name, _ in layer.named_parameters()) == ["bias", "weight", "weight_1"]


def test_rows_that_end_within_a_tile_stay_apart() -> None:
    gate, gate_numbers = stored(Kind.Q8_0, 24, 64)
    up, up_numbers = stored(Kind.Q8_0, 24, 64)
    layer = filled(
        MergedColumnParallelLinear(64, {"gate": 24, "up": 24}, bias=False, options=options()), {"gate": gate, "up": up}
    )
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), rounded_product(x, torch.cat([gate_numbers, up_numbers])), **TOLERANCE)


@pytest.mark.parametrize("other", [Kind.F32, Kind.F16, Kind.BF16, Kind.TQ2_0])
def test_one_type_without_a_product_turns_the_layer_into_plain_numbers(other: Kind) -> None:
    types = StorageTypes()
    gate, gate_numbers = stored(Kind.Q4_0, 32, 256)
    up, up_numbers = stored(other, 32, 256)
    layer = filled(
        MergedColumnParallelLinear(256, {"gate": 32, "up": 32}, bias=False, options=options(types)),
        {"gate": gate, "up": up},
    )
    x = torch.randn(3, 256)
    torch.testing.assert_close(layer(x), x @ torch.cat([gate_numbers, up_numbers]).T, **TOLERANCE)
    assert types.summary("float32") == (
        "matrices kept as stored: none; dequantized to float32, since there is no product for their type: "
        f"{', '.join(sorted(['1 Q4_0', f'1 {other.name}'], key=lambda part: part[2:]))}"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_embedding_is_also_the_head_in_one_copy(dtype: str) -> None:
    rows, numbers = stored(Kind.Q4_1, 131, 96)
    layer = VocabParallelEmbedding(131, 96, options(dtype=dtype))
    filled(layer, {None: rows})
    ids, hidden = torch.tensor([130, 0, 7, 7]), torch.randn(2, 96).to(getattr(torch, dtype))
    assert torch.equal(layer(ids), numbers[ids])
    logits = layer.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, rounded_product(hidden.float(), numbers), **TOLERANCE)
    assert len(list(layer.parameters())) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_inputs_at_the_borders_of_blocks(size: int) -> None:
    rows, numbers = stored(Kind.Q5_1, 32, 192)
    layers = [
        filled(RowParallelLinear(192, 32, bias=False, options=options(rank=rank, size=size)), {None: rows})
        for rank in range(size)
    ]
    x = torch.randn(4, 192)
    total = torch.stack([layer(part) for layer, part in zip(layers, x.chunk(size, -1), strict=True)]).sum(0)
    torch.testing.assert_close(total, rounded_product(x, numbers), **TOLERANCE)


def test_a_share_that_cuts_a_block_is_refused() -> None:
    rows, _ = stored(Kind.Q4_0, 32, 96)
    layer = RowParallelLinear(96, 32, bias=False, options=options(rank=1, size=2))
    with pytest.raises(ModelLoadError, match="inputs 48 to 96, cuts through Q4_0 blocks of 32"):
        layer.load_weight("weight", rows)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_share_outputs_by_heads(size: int) -> None:
    parts = {shard: stored(Kind.Q4_1, 64 if shard == "q" else 32, 64) for shard in ("q", "k", "v")}
    layers = [
        filled(
            QKVParallelLinear(64, 16, 4, 2, bias=False, options=options(rank=rank, size=size)),
            {shard: rows for shard, (rows, _) in parts.items()},
        )
        for rank in range(size)
    ]
    x = torch.randn(3, 64)
    for i, (_, numbers) in enumerate(parts.values()):
        together = torch.cat([layer(x).split(layer.sizes, -1)[i] for layer in layers], -1)
        torch.testing.assert_close(together, rounded_product(x, numbers), **TOLERANCE)


def test_one_stacked_tensor_is_split_among_the_shards() -> None:
    rows, numbers = stored(Kind.Q8_0, 96, 64)
    layer = filled(QKVParallelLinear(64, 16, 2, 2, bias=False, options=options()), {None: rows})
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), rounded_product(x, numbers), **TOLERANCE)


def test_a_wrong_shape_is_refused() -> None:
    rows, _ = stored(Kind.Q8_0, 32, 64)
    layer = RowParallelLinear(96, 32, bias=False, options=options())
    with pytest.raises(ModelLoadError, match=r"expected shape \[32, 96\], found \[32, 64\]"):
        layer.load_weight("weight", rows)


def test_a_method_that_knows_no_bits_gets_numbers() -> None:
    rows, numbers = stored(Kind.Q8_0, 32, 64)
    plain = BuildOptions(torch.float32, torch.device("cpu"), UnquantizedLinearMethod(), max_positions=64)
    layer = filled(RowParallelLinear(64, 32, bias=False, options=plain), {None: rows})
    assert torch.equal(layer.weight, numbers)


def test_every_type_with_a_product_can_be_dequantized_too() -> None:
    assert kernels.GGUF_PACKABLE <= kernels.DEQUANTIZABLE
