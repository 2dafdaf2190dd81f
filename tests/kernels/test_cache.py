"""Writing keys and values into the paged cache, whose order csrc/cpu/kv_cache.h describes."""

import pytest
import torch

from tests.kernels.helpers import DTYPES, STORED, assert_rounds_alike, empty_cache
from vllm_clone.kernels import Rotary, reference
from vllm_clone.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("level")


def in_order(cache: torch.Tensor, size: int) -> torch.Tensor:
    """A cache that the compiled kernels wrote, as the reference keeps it; one byte per element as uint8."""
    blocks, _, heads, block_size, _ = cache.shape
    depth = 1 if cache.dtype in (torch.float32, torch.float16) else 2
    raw = (cache.view(torch.uint8) if cache.element_size() == 1 else cache).flatten(3)
    numbers, scales = raw[..., : block_size * size], raw[..., block_size * size :]
    keys, values = numbers.unbind(1)
    groups = [
        part.unflatten(-1, (size // depth, -1, depth)).transpose(-3, -2).flatten(-2)
        for part in keys.split(16 * size, dim=-1)
    ]
    values = values.unflatten(-1, (block_size // depth, size, depth)).transpose(-2, -1)
    both = torch.stack([torch.cat(groups, dim=2), values.reshape(blocks, heads, block_size, size)], dim=1)
    return torch.cat([both.flatten(3), scales], dim=-1).view(raw.dtype).view_as(cache.view(raw.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("stored", "scaled"), STORED)
@pytest.mark.parametrize("block_size", [8, 16, 24, 128])
@pytest.mark.parametrize(("heads", "size"), [(3, 72), (2, 256)])
@pytest.mark.parametrize("tokens", [1, 45])
def test_tokens_go_to_their_slots_and_nowhere_else(dtype, stored, scaled, block_size, heads, size, tokens):
    slots = torch.randperm(7 * block_size)[:tokens]
    slots[1::5] = -1
    k, v = 3 * torch.randn(tokens, heads, size).to(dtype), torch.randn(tokens, heads, size).to(dtype)
    k[0, 0, :4] = torch.tensor([1e-3, -1e-7, 900.0, -60000.0])
    v[0] = 0
    actual, expected = (empty_cache(7, heads, block_size, size, stored, scaled=scaled) for _ in "ae")
    reference.reshape_and_cache(k, v, expected, slots)
    ops.reshape_and_cache(k, v, actual, slots)
    actual, expected = in_order(actual, size), expected.view(torch.uint8) if stored.itemsize == 1 else expected
    assert torch.equal(actual.nan_to_num(7e4), expected.nan_to_num(7e4))


def test_an_order_of_elements_written_out():
    cache = empty_cache(4, 1, 8, 2, torch.float32)
    k, v = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]])
    ops.reshape_and_cache(k, v, cache, torch.tensor([2 * 8 + 5]))
    assert cache[2, 0].flatten()[[5, 8 + 5]].tolist() == [1, 2]
    assert cache[2, 1, 0, 5].tolist() == [3, 4]
    assert cache.isnan().logical_not().sum() == 4


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_number_of_eight_bits_is_stored_exactly_and_read_back(stored):
    codes = torch.arange(256, dtype=torch.uint8).view(stored)
    numbers = codes[codes.float().isfinite()].float().repeat(2)[:246].view(1, 1, 246)
    cache = empty_cache(2, 1, 8, 246, stored)
    ops.reshape_and_cache(numbers, numbers, cache, torch.tensor([8]))
    out = torch.empty(1, 1, 246)
    one = torch.tensor([1], dtype=torch.int32)
    ops.paged_attention(
        torch.zeros(1, 1, 246), cache, one[None], torch.tensor([0, 1], dtype=torch.int32), one, scale=1.0, out_THD=out
    )
    assert torch.equal(out, numbers)


@pytest.mark.parametrize(("stored", "scaled"), STORED)
def test_a_number_that_is_none_stays_visible(stored, scaled):
    k = torch.randn(1, 1, 16)
    v = k.clone()
    v[0, 0, 3] = float("nan")
    cache = empty_cache(2, 1, 8, 16, stored, scaled=scaled)
    ops.reshape_and_cache(k, v, cache, torch.tensor([8]))
    out, one = torch.zeros(1, 1, 16), torch.tensor([1], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    ops.paged_attention(torch.zeros(1, 1, 16), cache, one[None], starts, one, scale=1.0, out_THD=out)
    assert out.isnan().any()


def test_keys_and_values_may_be_parts_of_one_matrix():
    heads, size = 2, 40
    qkv = torch.randn(6, 5 * heads * size)
    k, v = (qkv[:, i * heads * size : (i + 1) * heads * size].view(6, heads, size) for i in (3, 4))
    actual, expected = (empty_cache(3, heads, 8, size, torch.float32) for _ in "ae")
    slots = torch.tensor([8, 9, 10, -1, 16, 23])
    ops.reshape_and_cache(k, v, actual, slots)
    ops.reshape_and_cache(k.contiguous(), v.contiguous(), expected, slots)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("size", "rotary_dim"), [(64, 64), (72, 20), (96, 48)])
@pytest.mark.parametrize(("queries", "lengths"), [([1, 1, 1], [1, 9, 30]), ([7, 1, 40], [7, 33, 50])])
def test_rotary_write_and_attention_in_one_call(dtype, is_neox, size, rotary_dim, queries, lengths):
    """The same bits as the three kernels one after the other, and queries and keys as they were."""
    tokens, heads, kv_heads, block_size = sum(queries), 6, 2, 16
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    table = torch.arange(3 * 4, dtype=torch.int32).view(3, 4) + 1
    places = [(r, n - q + i) for r, (q, n) in enumerate(zip(queries, lengths, strict=True)) for i in range(q)]
    positions = torch.tensor([position for _, position in places])
    slots = torch.tensor([int(table[r, p // block_size]) * block_size + p % block_size for r, p in places])
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype)
    before = qkv.clone()
    q, k, v = (
        part.unflatten(-1, (-1, size)) for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    )
    angles = torch.arange(64)[:, None] * torch.rand(rotary_dim // 2)
    rotary = Rotary(positions, torch.cat([angles.cos(), angles.sin()], dim=1), is_neox)
    past = torch.randn(2, 13 * block_size, kv_heads, size).to(dtype)
    caches = [empty_cache(13, kv_heads, block_size, size, dtype) for _ in "ab"]
    for cache in caches:
        ops.reshape_and_cache(past[0], past[1], cache, torch.arange(13 * block_size))
    rest = (table, starts, torch.tensor(lengths, dtype=torch.int32))
    actual, expected = (torch.full((tokens, heads, size), float("nan"), dtype=dtype) for _ in "ae")
    ops.fused_attention(q, k, v, caches[0], slots, *rest, rotary=rotary, scale=0.1, out_THD=actual)
    assert torch.equal(qkv, before)
    ops.rotary_embedding_(positions, q, k, rotary.cos_sin_PR, size, is_neox)
    ops.reshape_and_cache(k, v, caches[1], slots)
    ops.paged_attention(q, caches[1], *rest, scale=0.1, out_THD=expected)
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(actual, expected)


def test_one_call_is_what_its_definition_says():
    size, slots = 32, torch.tensor([9, 10, 11])
    q, k, v = torch.randn(3, 4, size), torch.randn(3, 2, size), torch.randn(3, 2, size)
    angles = torch.arange(64)[:, None] * torch.rand(size // 2)
    rotary = Rotary(torch.tensor([1, 2, 3]), torch.cat([angles.cos(), angles.sin()], dim=1), True)
    index = (torch.tensor([[1]], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32))
    results = []
    for module in (ops, reference):
        cache = empty_cache(2, 2, 8, size, torch.float32)
        module.reshape_and_cache(k[:1] * 2, v[:1] * 2, cache, torch.tensor([8]))
        out = torch.full_like(q, float("nan"))
        lengths = torch.tensor([4], dtype=torch.int32)
        module.fused_attention(q, k, v, cache, slots, *index, lengths, rotary=rotary, scale=0.2, out_THD=out)
        results.append(out)
    assert_rounds_alike(*results, loss=1e-5)
