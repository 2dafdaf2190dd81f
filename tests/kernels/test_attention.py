"""Attention over the paged cache, against its definition in plain torch."""

import math
import random
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from tests.kernels.helpers import DTYPES, SPACING, STORED, empty_cache
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops

NAN = float("nan")
BF16 = torch.bfloat16


@dataclass
class Batch:
    """Queries and the keys and values they read, each in a slot of the cache; no other slot is written."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    num_blocks: int
    block_size: int
    cache_dtype: torch.dtype
    scaled: bool = False

    def cache(self, module: ModuleType) -> torch.Tensor:
        """The cache as a module fills it; what is not written is NaN."""
        _, heads, size = self.keys.shape
        cache = empty_cache(self.num_blocks, heads, self.block_size, size, self.cache_dtype, scaled=self.scaled)
        module.reshape_and_cache(self.keys, self.values, cache, self.slots)
        return cache

    def attend(self, module: ModuleType = ops, cache: torch.Tensor | None = None, **options) -> torch.Tensor:
        out = torch.full_like(self.q, NAN)
        options.setdefault("scale", self.q.shape[-1] ** -0.5)
        cache = self.cache(module) if cache is None else cache
        module.paged_attention(self.q, cache, self.table, self.starts, self.lengths, out_THD=out, **options)
        return out

    def row(self, r: int) -> "Batch":
        """One row by itself."""
        begin, end = self.starts[r], self.starts[r + 1]
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        return replace(
            self, q=self.q[begin:end], table=self.table[r : r + 1], starts=starts, lengths=self.lengths[r : r + 1]
        )


def make_batch(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    scaled: bool = False,
    window: int = 0,
) -> Batch:
    """Rows of (queries, sequence length) in shuffled blocks; blocks before the window are the null block 0."""
    need = [-(-length // block_size) for _, length in rows]
    ids = list(range(1, sum(need) + 1))
    num_blocks = len(ids) + 1
    random.Random(0).shuffle(ids)
    table = torch.zeros(len(rows), max(need, default=0) + 3, dtype=torch.int32)
    slots: list[int] = []
    for r, (queries, length) in enumerate(rows):
        oldest = max(0, length - queries - window + 1) if window else 0
        for i in range(need[r]):
            block = ids.pop()
            if (i + 1) * block_size <= oldest:
                continue
            table[r, i] = block
            first, last = max(oldest - i * block_size, 0), min(length - i * block_size, block_size)
            slots += range(block * block_size + first, block * block_size + last)
    counts = torch.tensor([0, *(q for q, _ in rows)])
    q = torch.randn(int(counts.sum()), heads, size).to(dtype)
    keys, values = torch.randn(2, len(slots), kv_heads, size).to(dtype)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    return Batch(
        q, keys, values, torch.tensor(slots, dtype=torch.int64), table, counts.cumsum(0).int(), lengths, num_blocks,
        block_size, cache_dtype or dtype, scaled,
    )  # fmt: skip


def share(batch: Batch, rows: list[int], blocks: int) -> Batch:
    """Let rows begin with the same blocks as the first of them."""
    batch.table[rows, :blocks] = batch.table[rows[0], :blocks].clone()
    return batch


def assert_matches_reference(batch: Batch, *, loss: float = 1e-5, **options) -> None:
    actual, expected = batch.attend(**options).float(), batch.attend(reference, **options).float()
    assert not expected.isnan().any()
    tolerance = SPACING[batch.q.dtype] + loss
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


MIXED = [(1, 1), (1, 17), (5, 5), (0, 0), (20, 33), (1, 40), (7, 48), (3, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128])
def test_prefill_and_decode_rows_mixed(level, dtype, block_size):
    assert_matches_reference(make_batch(MIXED, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 32, 40, 72, 80, 96, 128, 192, 256, 512])
def test_head_sizes(level, dtype, size):
    assert_matches_reference(make_batch([(1, 30), (9, 20)], size=size, dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (8, 8), (6, 1), (16, 2), (64, 1), (71, 1)])
def test_groups_of_query_heads(level, heads, kv_heads):
    assert_matches_reference(make_batch([(1, 30), (9, 20)], heads=heads, kv_heads=kv_heads, size=32))


@pytest.mark.parametrize("block_size", [8, 16, 24])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 31, 100])
def test_windows_at_and_around_block_edges(level, block_size, window):
    assert_matches_reference(make_batch(MIXED, block_size=block_size, window=window), sliding_window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_in_a_long_sequence_reads_no_block_before_it(level, dtype):
    batch = make_batch([(1, 700), (30, 500), (1, 513)], window=300, dtype=dtype)
    assert (batch.table[0, :20] == 0).all()
    assert_matches_reference(batch, sliding_window=300)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(level, softcap):
    assert_matches_reference(make_batch(MIXED), softcap=softcap, scale=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 32, 128])
@pytest.mark.parametrize("length", [255, 256, 511, 512, 513, 2048, 2051])
def test_decoding_behind_a_long_context(level, dtype, block_size, length):
    assert_matches_reference(make_batch([(1, length)], block_size=block_size, dtype=dtype, heads=3, kv_heads=1))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("stored", "scaled"), STORED)
@pytest.mark.parametrize(("size", "block_size"), [(64, 16), (40, 8), (128, 32)])
def test_caches_of_other_types_than_the_queries(level, dtype, stored, scaled, size, block_size):
    batch = make_batch(
        [*MIXED, (1, 700)], dtype=dtype, cache_dtype=stored, scaled=scaled, size=size, block_size=block_size
    )
    # Scales follow the weights of values, which bfloat16 products round.
    assert_matches_reference(batch, loss=2e-2 if dtype == BF16 else 1e-5)


@pytest.mark.parametrize(("stored", "scaled"), STORED[3:])
def test_windows_over_eight_bits(level, stored, scaled):
    batch = make_batch(MIXED, cache_dtype=stored, scaled=scaled, window=9, dtype=BF16)
    assert_matches_reference(batch, sliding_window=9, softcap=20.0, loss=2e-2)


@pytest.mark.parametrize(("stored", "bound"), [(torch.int8, 0.01), (torch.float8_e4m3fn, 0.04)])
def test_scaled_bytes_lose_little(level, stored, bound):
    exact = make_batch([(40, 90), (1, 500)])
    exact.keys *= 1000  # far beyond the numbers of the type
    exact.q /= 1000
    stored_batch = replace(exact, cache_dtype=stored, scaled=True)
    error = (stored_batch.attend() - exact.attend()).abs().max()
    assert 0 < error < bound * exact.values.abs().max()


@pytest.mark.parametrize("count", [2, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_queries_behind_a_long_context(level, count, dtype):
    assert_matches_reference(make_batch([(count, 1700), (count, 40)], heads=6, kv_heads=2, dtype=dtype))


def test_a_long_prefill(level):
    assert_matches_reference(make_batch([(300, 300), (77, 600)], heads=2, kv_heads=1, size=32))


def test_an_empty_batch(level):
    batch = make_batch([])
    assert batch.attend().shape == (0, 4, 64)


def test_queries_may_be_part_of_one_matrix(level):
    batch = make_batch([(4, 10), (1, 5)])
    plain = batch.attend()
    whole = torch.full((5, 900), NAN)
    whole[:, 7 : 7 + 256] = batch.q.flatten(1)
    batch.q = whole[:, 7 : 7 + 256].view(5, 4, 64)
    out = torch.full((5, 4, 64), NAN)
    ops.paged_attention(batch.q, batch.cache(ops), batch.table, batch.starts, batch.lengths, scale=0.125, out_THD=out)
    assert torch.equal(out, plain)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest(level):
    batch = make_batch([(1, 600), (6, 40)])
    batch.q *= 1000
    assert_matches_reference(batch, loss=2e-3)  # scores near 10,000 are known to a thousandth


def test_nan_in_a_query_comes_out_in_its_head_only(level):
    batch = make_batch([(1, 600), (6, 40), (1, 1)])
    for token in (0, 3, 7):
        batch.q[token, 1, 5] = NAN
    expected = torch.zeros(8, 4, dtype=torch.bool)
    expected[[0, 3, 7], 1] = True
    assert torch.equal(batch.attend().isnan().any(-1), expected)
    assert torch.equal(batch.attend().isnan().all(-1), expected)


def test_nan_of_another_request_is_not_read(level):
    batch = make_batch([(1, 100), (1, 100)])
    alone = batch.row(1).attend()
    cache = batch.cache(ops)
    cache[batch.table[0, :7].long()] = NAN
    assert torch.equal(batch.attend(cache=cache)[1:], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_alone_and_in_company(level, dtype):
    batch = make_batch([*MIXED, (1, 1500), (60, 90), (1, 1600), (1, 800)], dtype=dtype)
    share(share(batch, [8, 10], 90), [10, 11], 20)
    together = batch.attend()
    for r in range(len(batch.lengths)):
        assert torch.equal(together[batch.starts[r] : batch.starts[r + 1]], batch.row(r).attend())


@pytest.mark.parametrize(("stored", "scaled"), STORED)
def test_sharing_changes_no_bit_whatever_is_stored(level, stored, scaled):
    batch = make_batch(
        [(1, 700), (1, 900), (1, 513)], heads=9, kv_heads=3, dtype=BF16, cache_dtype=stored, scaled=scaled
    )
    share(batch, [0, 1, 2], 32)
    together = batch.attend(softcap=20.0)
    for r in range(3):
        assert torch.equal(together[r : r + 1], batch.row(r).attend(softcap=20.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 24, 32, 128])
def test_rows_that_share_a_prefix(level, dtype, block_size):
    rows = [(1, 400), (1, 700), (5, 300), (1, 260), (1, 1), (1, 257), (1, 900)]
    batch = make_batch(rows, heads=6, kv_heads=2, block_size=block_size, dtype=dtype)
    share(batch, [1, 0, 3, 2, 6], 256 // block_size)
    share(batch, [6, 1], 512 // block_size)
    assert_matches_reference(batch)


@pytest.mark.parametrize(("stored", "scaled"), STORED)
def test_a_shared_prefix_of_every_type(level, stored, scaled):
    batch = make_batch([(1, 300), (1, 400), (1, 500)], heads=6, dtype=BF16, cache_dtype=stored, scaled=scaled)
    assert_matches_reference(share(batch, [0, 1, 2], 16), softcap=20.0, loss=2e-2)


def test_two_prefixes_and_more_rows_than_a_tile_has(level):
    batch = make_batch([(1, 150 + i) for i in range(50)], heads=9, kv_heads=3, dtype=BF16)
    share(batch, list(range(0, 50, 2)), 9)
    share(batch, list(range(1, 50, 2)), 8)
    assert_matches_reference(batch)


def test_a_prefix_ends_where_the_tables_differ(level):
    """Sequences of one length share all but the block that each writes to; a short prefix is not shared at all."""
    batch = make_batch([(1, 320), (1, 320), (1, 321)], dtype=BF16)
    assert_matches_reference(share(batch, [0, 1, 2], 20))
    assert_matches_reference(share(make_batch([(1, 320), (1, 320)]), [0, 1], 7))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(level, dtype):
    batch = share(make_batch([*MIXED, (1, 1500), (60, 90), (1, 1600)], dtype=dtype), [8, 10], 90)
    results = []
    for threads in (1, 2, 3):
        ops.set_num_threads(threads)
        results.append(batch.attend())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(level, seed):
    rng = random.Random(seed)
    kv_heads = rng.randint(1, 3)
    rows = []
    for _ in range(rng.randint(1, 6)):
        length = rng.choice([rng.randint(1, 20), rng.randint(1, 200), rng.randint(200, 700)])
        rows.append((rng.choice([1, rng.randint(0, min(length, 60))]), length))
    window = rng.choice([0, 0, rng.randint(1, 50)])
    batch = make_batch(
        rows,
        heads=kv_heads * rng.randint(1, 5),
        kv_heads=kv_heads,
        size=2 * rng.randint(1, 50),
        block_size=rng.choice([8, 16, 24, 32, 64]),
        dtype=rng.choice(DTYPES),
        window=window,
    )
    assert_matches_reference(batch, sliding_window=window, softcap=rng.choice([0.0, 5.0]))


def test_the_reference_is_attention(level):
    """The definition itself, against torch's own for one unpaged sequence."""
    batch = make_batch([(12, 12)], heads=4, kv_heads=4)
    q, k, v = (x.transpose(0, 1) for x in (batch.q, batch.keys, batch.values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=1 / math.sqrt(64)
    ).transpose(0, 1)
    torch.testing.assert_close(batch.attend(reference), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.attend(), expected, rtol=1e-5, atol=1e-5)
