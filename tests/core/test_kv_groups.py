"""Specs, grouping of layers, and what each kind of attention keeps, finds and frees."""

import pytest

from tests.core.harness import full, kv_config, sliding
from vllm_clone.config.kv_cache import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, group_layers
from vllm_clone.core.kv_cache.block_pool import BlockPool
from vllm_clone.core.kv_cache.group_manager import GroupManager, SlidingWindowManager

HASHES = [b"h%d" % i for i in range(20)]


def layers(num_full: int, num_sliding: int) -> dict[str, KVCacheSpec]:
    """Interleaved, as in a hybrid model."""
    specs: dict[str, KVCacheSpec] = {}
    for i in range(max(num_full, num_sliding)):
        if i < num_sliding:
            specs[f"s{i}"] = sliding(8)
        if i < num_full:
            specs[f"f{i}"] = full()
    return specs


def test_one_block_of_one_layer_holds_keys_and_values() -> None:
    assert FullAttentionSpec(16, 8, 128, "bfloat16").page_size_bytes == 64 * 1024


def test_layers_of_one_spec_are_one_group() -> None:
    (group,) = group_layers(layers(5, 0))
    assert group.layer_names == ("f0", "f1", "f2", "f3", "f4")


def test_group_size_is_the_smallest_bucket_and_layers_are_dealt_in_turn() -> None:
    groups = group_layers(layers(10, 20))
    assert [len(g.layer_names) for g in groups] == [10, 10, 10]
    assert [isinstance(g.spec, SlidingWindowSpec) for g in groups] == [False, True, True]
    assert groups[1].layer_names == tuple(f"s{i}" for i in range(0, 20, 2))


def test_near_equal_buckets_are_padded_to_the_larger() -> None:
    assert sorted(len(g.layer_names) for g in group_layers(layers(13, 12))) == [12, 13]


def test_all_groups_share_the_tensors_of_the_largest() -> None:
    config = kv_config(10, full(), sliding(8))
    assert config.num_tensors == 1
    assert config.bytes_per_block == full().page_size_bytes


@pytest.mark.parametrize(("window", "computed", "skipped"), [(4, 7, 4), (4, 3, 0), (4, 10, 7), (1, 5, 5)])
def test_tokens_no_later_token_attends_to(window: int, computed: int, skipped: int) -> None:
    manager = SlidingWindowManager(sliding(window), 0, BlockPool(4, True))
    assert manager.skipped_tokens(computed) == skipped


def test_blocks_outside_the_window_become_null_and_free() -> None:
    # W=4, bs=2: after 10 computed tokens 0 … 6 are out of reach, so three whole blocks are.
    pool = BlockPool(20, True)
    manager = SlidingWindowManager(sliding(4, 2), 0, pool)
    manager.adopt("r", [], ())
    manager.extend("r", 10, 0)
    manager.free_skipped("r", 10)
    table = manager.tables["r"]
    assert [b is pool.null_block for b in table] == [True, True, True, False, False]
    assert pool.num_free == 19 - 2
    manager.free_skipped("r", 10)
    manager.free("r", [], 10)
    assert pool.num_free == 19


def cached(manager: GroupManager, *indices: int) -> None:
    for i in indices:
        manager.pool.cache(manager.pool.allocate(1)[0], HASHES[i], manager.group)


def test_full_attention_finds_the_longest_run_from_the_start() -> None:
    manager = GroupManager(full(), 0, BlockPool(20, True))
    cached(manager, 0, 1, 2, 4)
    assert len(manager.find_prefix(HASHES, 10)) == 3
    assert len(manager.find_prefix(HASHES, 2)) == 2
    assert manager.find_prefix(HASHES, 0) == []


@pytest.mark.parametrize(
    ("window", "have", "limit", "hit", "nulls"),
    [
        (9, [3, 4], 10, 5, 3),  # two blocks cover W − 1 = 8 tokens
        (9, [3, 4, 6], 10, 5, 3),  # a lone block is too short
        (9, [3, 4, 6, 7], 10, 8, 6),  # the rightmost run wins
        (9, [3, 4, 6, 7], 7, 5, 3),
        (9, [0], 10, 1, 0),  # a short run counts at position 0
        (9, [1], 10, 0, 0),
        (9, [0, 1, 2], 10, 3, 1),
        (10, [3, 4], 10, 0, 0),  # W − 1 = 9 tokens need three blocks
        (1, [], 10, 10, 10),  # a token that sees only itself needs no keys
    ],
)
def test_a_sliding_window_finds_the_rightmost_run_that_covers_it(
    window: int, have: list[int], limit: int, hit: int, nulls: int
) -> None:
    pool = BlockPool(20, True)
    manager = SlidingWindowManager(sliding(window), 0, pool)
    cached(manager, *have)
    found = manager.find_prefix(HASHES, limit)
    assert len(found) == hit
    assert sum(b is pool.null_block for b in found) == nulls


def test_a_sliding_window_needs_no_more_blocks_than_window_and_step() -> None:
    manager = SlidingWindowManager(sliding(9), 0, BlockPool(4, True))
    assert manager.max_blocks(1000, max_in_flight=16) == 7  # cdiv(8 + 16, 4) + 1
    assert manager.max_blocks(10, max_in_flight=16) == 3


def test_only_windows_before_resume_points_are_indexed() -> None:
    pool = BlockPool(20, True)
    manager = SlidingWindowManager(sliding(9), 0, pool)
    manager.adopt("r", [], resume_points=(6, 3))
    manager.extend("r", 36, 0)
    manager.cache_full_blocks("r", HASHES, 36)
    assert [i for i in range(9) if pool.get_cached(HASHES[i], 0)] == [1, 2, 4, 5]


def test_the_last_window_is_indexed_when_a_request_ends() -> None:
    pool = BlockPool(20, True)
    manager = SlidingWindowManager(sliding(9), 0, pool)
    manager.adopt("r", [], ())
    manager.extend("r", 36, 0)
    manager.cache_full_blocks("r", HASHES, 34)
    manager.free("r", HASHES[:8], 34)
    assert [i for i in range(9) if pool.get_cached(HASHES[i], 0)] == [6, 7]
    assert len(manager.find_prefix(HASHES, 9)) == 8


def test_blocks_never_written_leave_the_index() -> None:
    pool = BlockPool(20, True)
    manager = GroupManager(full(), 0, pool)
    manager.adopt("r", [], ())
    manager.extend("r", 16, 0)
    manager.cache_full_blocks("r", HASHES, 16)
    manager.free("r", HASHES[:4], num_computed=9)
    assert [i for i in range(4) if pool.get_cached(HASHES[i], 0)] == [0, 1]
