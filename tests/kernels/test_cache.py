"""Writing keys and values into the paged cache."""

import pytest
import torch

from tests.kernels.helpers import DTYPES
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("level")


def empty_cache(blocks: int, heads: int, block_size: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((blocks, 2, heads, block_size, size), float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize(("heads", "size"), [(1, 32), (3, 72), (2, 256)])
@pytest.mark.parametrize("tokens", [0, 1, 45])
def test_tokens_go_to_their_slots_and_nowhere_else(dtype, block_size, heads, size, tokens):
    slots = torch.randperm(7 * block_size)[:tokens]
    slots[1::5] = -1
    k, v = torch.randn(tokens, heads, size).to(dtype), torch.randn(tokens, heads, size).to(dtype)
    actual = empty_cache(7, heads, block_size, size, dtype)
    expected = actual.clone()
    reference.reshape_and_cache(k, v, expected, slots)
    ops.reshape_and_cache(k, v, actual, slots)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert actual.isnan().logical_not().sum() == 2 * heads * size * int((slots >= 0).sum())


def test_slot_is_block_times_size_plus_offset():
    cache = empty_cache(4, 1, 8, 2, torch.float32)
    k, v = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]])
    ops.reshape_and_cache(k, v, cache, torch.tensor([2 * 8 + 5]))
    assert cache[2, 0, 0, 5].tolist() == [1, 2]
    assert cache[2, 1, 0, 5].tolist() == [3, 4]


def test_keys_and_values_may_be_parts_of_one_matrix():
    heads, size = 2, 40
    qkv = torch.randn(6, 5 * heads * size)
    k, v = (qkv[:, i * heads * size : (i + 1) * heads * size].view(6, heads, size) for i in (3, 4))
    actual = empty_cache(3, heads, 8, size, torch.float32)
    expected = actual.clone()
    slots = torch.tensor([8, 9, 10, -1, 16, 23])
    ops.reshape_and_cache(k, v, actual, slots)
    reference.reshape_and_cache(k, v, expected, slots)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
