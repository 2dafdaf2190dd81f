"""Tensor parallelism divides matrices so that the ranks' results, put together, are those of one rank."""

from collections.abc import Callable

import pytest
import torch

from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.embedding import VocabParallelEmbedding
from vllm_clone.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm_clone.layers.options import BuildOptions, TensorParallel

METHOD = UnquantizedLinearMethod()
Build = Callable[[BuildOptions], LinearBase]


def options(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> BuildOptions:
    """Options of one rank whose collectives do nothing: the test itself puts the ranks' results together."""
    tp = TensorParallel(rank, size, lambda x: x, lambda x: x) if size > 1 else TensorParallel()
    return BuildOptions(dtype, torch.device("cpu"), METHOD, max_positions=64, tp=tp)


def ranks(build: Build, size: int, weights: dict[tuple[str, str | None], torch.Tensor]) -> list[LinearBase]:
    """The layer on every rank, each loaded from the same full tensors."""
    layers = [build(options(rank, size)) for rank in range(size)]
    for layer in layers:
        for (name, shard), tensor in weights.items():
            layer.load_weight(name, tensor, shard)
        assert layer.pending() == []
    return layers


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_outputs_concatenate(size: int) -> None:
    weight, bias, x = torch.randn(12, 8), torch.randn(12), torch.randn(5, 8)
    layers = ranks(
        lambda o: ColumnParallelLinear(8, 12, bias=True, options=o),
        size,
        {("weight", None): weight, ("bias", None): bias},
    )
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], -1), x @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_outputs_sum_and_the_bias_counts_once(size: int) -> None:
    weight, bias, x = torch.randn(6, 8), torch.randn(6), torch.randn(5, 8)
    layers = ranks(
        lambda o: RowParallelLinear(8, 6, bias=True, options=o), size, {("weight", None): weight, ("bias", None): bias}
    )
    parts = [layer(part) for layer, part in zip(layers, x.chunk(size, -1), strict=True)]
    torch.testing.assert_close(torch.stack(parts).sum(0), x @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2])
def test_merged_outputs_keep_gate_and_up_of_a_rank_together(size: int) -> None:
    gate, up, x = torch.randn(6, 8), torch.randn(6, 8), torch.randn(5, 8)
    layers = ranks(
        lambda o: MergedColumnParallelLinear(8, {"gate": 6, "up": 6}, bias=False, options=o),
        size,
        {("weight", "up"): up, ("weight", "gate"): gate},
    )
    halves = [layer(x).chunk(2, -1) for layer in layers]
    torch.testing.assert_close(torch.cat([h[0] for h in halves], -1), x @ gate.T)
    torch.testing.assert_close(torch.cat([h[1] for h in halves], -1), x @ up.T)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("stacked", [False, True], ids=["three-tensors", "one-tensor"])
def test_each_rank_gets_its_query_heads_and_the_key_heads_they_read(
    size: int, num_kv_heads: int, stacked: bool
) -> None:
    num_heads, head_size = 4, 3
    q, k, v = (torch.randn(n * head_size, 8) for n in (num_heads, num_kv_heads, num_kv_heads))
    bias = torch.randn(len(q) + len(k) + len(v))
    if stacked:
        weights = {("weight", None): torch.cat((q, k, v)), ("bias", None): bias}
    else:
        weights = {("weight", "k"): k, ("weight", "q"): q, ("weight", "v"): v, ("bias", None): bias}
    layers = ranks(
        lambda o: QKVParallelLinear(8, head_size, num_heads, num_kv_heads, bias=True, options=o), size, weights
    )
    q_bias, k_bias, v_bias = bias.split([len(q), len(k), len(v)])
    group = num_heads // num_kv_heads
    for rank, layer in enumerate(layers):
        assert isinstance(layer, QKVParallelLinear)
        assert layer.num_heads == num_heads // size
        rows = slice(rank * layer.num_heads * head_size, (rank + 1) * layer.num_heads * head_size)
        first = rank * layer.num_heads // group
        kv_rows = slice(first * head_size, (first + layer.num_kv_heads) * head_size)
        mine = layer.weight.split(layer.sizes)
        for part, full, where in zip(mine, (q, k, v), (rows, kv_rows, kv_rows), strict=True):
            assert torch.equal(part, full[where])
        assert torch.equal(layer.bias, torch.cat((q_bias[rows], k_bias[kv_rows], v_bias[kv_rows])))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [12, 13])
def test_vocabulary_is_divided_among_ranks(size: int, vocab_size: int) -> None:
    weight, ids = torch.randn(vocab_size, 8), torch.tensor([0, 12 % vocab_size, 5, 5, 11])
    layers = ranks(lambda o: VocabParallelEmbedding(vocab_size, 8, o), size, {("weight", None): weight})
    torch.testing.assert_close(torch.stack([layer(ids) for layer in layers]).sum(0), weight[ids])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_logits_of_the_ranks_join_to_the_whole_vocabulary(size: int) -> None:
    weight, hidden = torch.randn(13, 8), torch.randn(3, 8)
    plain = ranks(lambda o: VocabParallelEmbedding(13, 8, o), size, {("weight", None): weight})
    pieces: list[torch.Tensor] = []

    def collect(x: torch.Tensor) -> torch.Tensor:
        pieces.append(x)
        return torch.cat(pieces, -1)

    for layer in plain:
        if size > 1:
            layer.tp = TensorParallel(layer.tp.rank, size, lambda x: x, collect)
        logits = layer.logits(hidden)
    assert logits.shape == (3, 13)
    torch.testing.assert_close(logits, hidden @ weight.T)


def test_logits_are_float32_whatever_the_weights_are() -> None:
    head = VocabParallelEmbedding(13, 8, options(dtype=torch.bfloat16))
    head.load_weight("weight", torch.randn(13, 8))
    assert head.logits(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"query heads \(3\) cannot be divided by the tensor parallel size 2"):
        QKVParallelLinear(8, 4, 3, 1, bias=False, options=options(0, 2))


def test_more_ranks_without_collectives_are_refused() -> None:
    with pytest.raises(ValueError, match="more than one rank needs"):
        TensorParallel(0, 2)


def test_missing_shards_are_known() -> None:
    layer = QKVParallelLinear(8, 4, 2, 1, bias=False, options=options())
    layer.load_weight("weight", torch.zeros(8, 8), "q")
    assert layer.pending() == [("weight", "k"), ("weight", "v")]


def test_a_rank_allocates_only_its_part() -> None:
    layer = ColumnParallelLinear(8, 12, bias=False, options=options(1, 4))
    assert layer.weight.shape == (3, 8)
    assert layer.weight.nbytes == 3 * 8 * 4


class Doubling(UnquantizedLinearMethod):
    """Repacks as weight × 2, to see that prepare's result is what apply uses."""

    def prepare(self, layer: LinearBase) -> None:
        layer.weight.mul_(2)


def test_prepare_changes_what_apply_multiplies_by() -> None:
    layer = ColumnParallelLinear(
        8, 4, bias=False, options=BuildOptions(torch.float32, torch.device("cpu"), Doubling(), max_positions=1)
    )
    weight, x = torch.randn(4, 8), torch.randn(2, 8)
    layer.load_weight("weight", weight)
    layer.prepare()
    torch.testing.assert_close(layer(x), x @ weight.T * 2)
