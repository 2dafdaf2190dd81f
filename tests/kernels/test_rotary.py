"""Rotary position embedding in place."""

import pytest
import torch

from tests.kernels.helpers import DTYPES, assert_rounds_alike
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("level")
MAX_POSITION = 50


def table(rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(MAX_POSITION)[:, None] * torch.rand(rotary_dim // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (72, 72), (80, 32), (32, 20), (128, 128), (2, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_pairs_turn_by_the_angle_of_their_position(dtype, is_neox, head_size, rotary_dim, tokens):
    positions = torch.randint(0, MAX_POSITION, (tokens,))
    q, k = torch.randn(tokens, 6 * head_size).to(dtype), torch.randn(tokens, 2 * head_size).to(dtype)
    expected_q, expected_k = q.clone(), k.clone()
    reference.rotary_embedding_(positions, expected_q, expected_k, table_ := table(rotary_dim), head_size, is_neox)
    ops.rotary_embedding_(positions, q, k, table_, head_size, is_neox)
    assert_rounds_alike(q, expected_q)
    assert_rounds_alike(k, expected_k)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("split_heads", [True, False])
def test_queries_and_keys_may_be_parts_of_one_matrix(is_neox, split_heads):
    heads, kv_heads, size = 4, 2, 48
    qkv = torch.randn(7, (heads + 2 * kv_heads) * size)
    expected = qkv.clone()
    positions, cos_sin = torch.arange(7), table(size)
    for rotate, whole in ((ops.rotary_embedding_, qkv), (reference.rotary_embedding_, expected)):
        q, k, _ = whole.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
        if split_heads:
            q, k = q.unflatten(1, (heads, size)), k.unflatten(1, (kv_heads, size))
        rotate(positions, q, k, cos_sin, size, is_neox)
    assert_rounds_alike(qkv, expected)


def test_what_lies_beyond_the_rotary_part_is_untouched():
    q, k = torch.randn(3, 2 * 40), torch.randn(3, 40)
    before = q.clone()
    ops.rotary_embedding_(torch.arange(3) + 1, q, k, table(16), 40, True)
    heads, old = q.unflatten(1, (2, 40)), before.unflatten(1, (2, 40))
    assert torch.equal(heads[..., 16:], old[..., 16:])
    assert not torch.equal(heads[..., :16], old[..., :16])


def test_lengths_are_kept_and_position_zero_turns_nothing():
    q, k = torch.randn(2, 64), torch.randn(2, 64)
    before = q.clone()
    ops.rotary_embedding_(torch.tensor([0, 31]), q, k, table(64), 64, True)
    assert torch.equal(q[0], before[0])
    torch.testing.assert_close(q[1].norm(), before[1].norm())
