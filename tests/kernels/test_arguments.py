"""Arguments that would make a kernel read or write memory that is not its own are refused."""

from typing import Any

import pytest
import torch

from vllm_clone.kernels.cpu import ops

F32, BF16, F64, I32, I64 = torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def every_second(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Numbers that do not lie side by side along the last axis."""
    return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


NORMS = [
    (zeros(2, 8), zeros(7)),
    (zeros(2, 8, dtype=BF16), zeros(8)),
    (zeros(2, 8, dtype=F64), zeros(8, dtype=F64)),
    (zeros(2, 8), every_second(8)),
    (zeros(2, 8), zeros(8, 1)),
    (zeros(2, 0), zeros(0)),
]


@pytest.mark.parametrize(("x", "weight"), NORMS)
def test_norms(x, weight):
    with pytest.raises(ValueError):
        ops.rms_norm(x, weight, 1e-5)
    with pytest.raises(ValueError):
        ops.fused_add_rms_norm(x, x.clone(), weight, 1e-5)
    with pytest.raises(ValueError):
        ops.layer_norm(x, weight, None, 1e-5)
    with pytest.raises(ValueError):
        ops.layer_norm(x, torch.ones(x.shape[-1], dtype=x.dtype), weight, 1e-5)


@pytest.mark.parametrize(
    ("x", "residual"),
    [
        (zeros(2, 8), zeros(3, 8)),
        (zeros(2, 8), zeros(2, 8, dtype=BF16)),
        (every_second(2, 8), zeros(2, 8)),
        (zeros(2, 8), every_second(2, 8)),
    ],
)
def test_in_place_norms_need_two_alike(x, residual):
    with pytest.raises(ValueError, match="norm: "):
        ops.fused_add_rms_norm(x, residual, torch.ones(8), 1e-5)


ROTARY = {
    "positions_T": zeros(3, dtype=I64), "q_T_HD": zeros(3, 16), "k_T_KD": zeros(3, 8), "cos_sin_PR": zeros(5, 8),
    "head_size": 8, "is_neox": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions_T": zeros(3, dtype=I32)},
        {"positions_T": zeros(2, dtype=I64)},
        {"positions_T": every_second(3, dtype=I64)},
        {"q_T_HD": zeros(3, 20)},
        {"q_T_HD": zeros(3, 4, 4)},
        {"q_T_HD": zeros(3, 16, dtype=F64)},
        {"q_T_HD": every_second(3, 16)},
        {"q_T_HD": zeros(2, 3, 8).transpose(0, 1)},
        {"k_T_KD": zeros(3, 0)},
        {"k_T_KD": zeros(4, 8)},
        {"cos_sin_PR": zeros(5, 10)},
        {"cos_sin_PR": zeros(5, 7)},
        {"cos_sin_PR": zeros(5, 8, dtype=BF16)},
        {"cos_sin_PR": every_second(5, 8)},
    ],
)
def test_rotary(wrong):
    ops.rotary_embedding_(**ROTARY)
    with pytest.raises(ValueError):
        ops.rotary_embedding_(**(ROTARY | wrong))


@pytest.mark.parametrize("x", [zeros(2, 7), zeros(2, 0), zeros(2, 8, dtype=F64)])
def test_gated_activations(x):
    with pytest.raises(ValueError):
        ops.silu_and_mul(x)
    with pytest.raises(ValueError):
        ops.gelu_and_mul(x, approximate="none")


def test_an_unknown_approximation():
    for kernel in (ops.gelu, ops.gelu_and_mul):
        with pytest.raises(ValueError, match="quick is none of none, tanh"):
            kernel(zeros(2, 8), approximate="quick")


CACHE = {
    "k_TKD": zeros(3, 2, 4), "v_TKD": zeros(3, 2, 4), "kv_cache": zeros(5, 2, 2, 8, 4),
    "slot_mapping_T": zeros(3, dtype=I64),
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"k_TKD": zeros(3, 8)},
        {"k_TKD": zeros(3, 1, 4)},
        {"k_TKD": zeros(3, 2, 4, dtype=BF16)},
        {"k_TKD": zeros(3, 4, 2).transpose(1, 2)},
        {"v_TKD": zeros(3, 1, 4)},
        {"v_TKD": zeros(2, 2, 4)},
        {"v_TKD": every_second(3, 2, 4)},
        {"kv_cache": zeros(5, 2, 2, 8, 6)},
        {"kv_cache": zeros(5, 1, 2, 8, 4)},
        {"kv_cache": zeros(5, 2, 8, 2, 4)},
        {"kv_cache": zeros(5, 2, 2, 8)},
        {"kv_cache": every_second(5, 2, 2, 8, 4)},
        {"slot_mapping_T": zeros(2, dtype=I64)},
        {"slot_mapping_T": zeros(3, dtype=I32)},
        {"slot_mapping_T": every_second(3, dtype=I64)},
        {name: CACHE[name].to(F64) for name in ("k_TKD", "v_TKD", "kv_cache")},
    ],
)
def test_cache_writes(wrong):
    ops.reshape_and_cache(**CACHE)
    with pytest.raises(ValueError):
        ops.reshape_and_cache(**(CACHE | wrong))


ATTENTION: dict[str, Any] = {
    "q_THD": zeros(3, 4, 8), "kv_cache": zeros(5, 2, 2, 8, 8), "block_table_RB": zeros(1, 2, dtype=I32),
    "query_start_loc_R1": torch.tensor([0, 3], dtype=I32), "seq_lens_R": torch.tensor([3], dtype=I32), "scale": 1.0,
    "out_THD": zeros(3, 4, 8),
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"q_THD": zeros(3, 32)},
        {"q_THD": zeros(3, 5, 8), "out_THD": zeros(3, 5, 8)},
        {"q_THD": zeros(3, 4, 6), "out_THD": zeros(3, 4, 6)},
        {"q_THD": zeros(3, 4, 8, dtype=BF16)},
        {"q_THD": every_second(3, 4, 8)},
        {"kv_cache": zeros(5, 1, 2, 8, 8)},
        {"kv_cache": zeros(5, 2, 0, 8, 8)},
        {"kv_cache": zeros(5, 2, 2, 8)},
        {"kv_cache": every_second(5, 2, 2, 8, 8)},
        {"kv_cache": zeros(5, 2, 2, 8, 8, dtype=I32)},
        {"kv_cache": zeros(5, 2, 2, 8, 8, dtype=torch.int8)},
        {"kv_cache": zeros(5, 2, 2, 7, 8)},
        {"q_THD": zeros(3, 4, 7), "out_THD": zeros(3, 4, 7), "kv_cache": zeros(5, 2, 2, 8, 7)},
        {"block_table_RB": zeros(1, 2, dtype=I64)},
        {"block_table_RB": zeros(0, 2, dtype=I32)},
        {"block_table_RB": every_second(1, 2, dtype=I32)},
        {"query_start_loc_R1": torch.tensor([0, 3])},
        {"query_start_loc_R1": torch.tensor([0], dtype=I32)},
        {"seq_lens_R": torch.tensor([3])},
        {"seq_lens_R": torch.tensor([3, 3], dtype=I32)},
        {"out_THD": zeros(2, 4, 8)},
        {"out_THD": every_second(3, 4, 8)},
        {"out_THD": zeros(3, 4, 8, dtype=BF16)},
        {"q_THD": zeros(3, 4, 520), "out_THD": zeros(3, 4, 520), "kv_cache": zeros(5, 2, 2, 8, 520)},
    ],
)
def test_attention(wrong):
    ops.paged_attention(**ATTENTION)
    with pytest.raises(ValueError):
        ops.paged_attention(**(ATTENTION | wrong))


PACKED, PACKED_BF16 = ops.pack_linear(zeros(40, 6)), ops.pack_linear(zeros(40, 6, dtype=BF16))


@pytest.mark.parametrize(
    ("x", "packed", "outputs", "bias"),
    [
        (zeros(2, 5), PACKED, 40, None),
        (zeros(2, 7, dtype=BF16), PACKED_BF16, 40, None),
        (zeros(2, 6), PACKED_BF16, 40, None),
        (zeros(2, 6, dtype=torch.float16), PACKED_BF16, 40, None),
        (zeros(2, 6), zeros(40, 6), 40, None),
        (zeros(2, 6), PACKED, 32, None),
        (zeros(2, 6), PACKED, 65, None),
        (zeros(2, 6), every_second(2, 6, 32), 40, None),
        (zeros(2, 6), PACKED, 40, zeros(39)),
        (zeros(2, 6), PACKED, 40, zeros(40, dtype=BF16)),
        (zeros(2, 6), PACKED, 40, every_second(40)),
    ],
)
def test_linear(x, packed, outputs, bias):
    with pytest.raises(ValueError, match="linear"):
        ops.linear(x, packed, outputs, bias)


def test_products_come_in_the_inputs_type_or_float32():
    with pytest.raises(ValueError, match="linear"):
        ops.linear(zeros(2, 6), PACKED, 40, None, BF16)


def test_weights_to_pack_lie_side_by_side():
    with pytest.raises(ValueError, match="pack_linear"):
        ops.pack_linear(every_second(4, 6))


def test_an_unknown_instruction_set():
    before = ops.active_level()
    with pytest.raises(ValueError, match="no kernels for avx9000"):
        ops.use_level("avx9000")
    assert ops.active_level() == before
