"""Free list order, reference counts, the index of cached blocks."""

from vllm_clone.core.kv_cache.block_pool import BlockPool, KVBlock


def ids(blocks: list[KVBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def pool_with_cached_chain(num_blocks: int, length: int) -> tuple[BlockPool, list[KVBlock]]:
    """A pool that holds a freed chain of cached blocks, keys b"0", b"1" …"""
    pool = BlockPool(num_blocks, True)
    chain = pool.allocate(length)
    for i, block in enumerate(chain):
        pool.cache(block, b"%d" % i, 0)
    pool.free(reversed(chain))
    return pool, chain


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4, True)
    assert ids(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_usage_counts_usable_blocks_only() -> None:
    pool = BlockPool(5, True)
    assert pool.usage == 0
    pool.allocate(2)
    assert pool.usage == 0.5


def test_a_pool_of_only_the_null_block_has_no_usage() -> None:
    assert BlockPool(1, True).usage == 0


def test_uncached_blocks_are_reused_first_and_chain_ends_before_chain_starts() -> None:
    # 10 tokens in blocks of 4: blocks 1 and 2 are full and cached, block 3 is not.
    pool = BlockPool(7, True)
    blocks = pool.allocate(3)
    pool.cache(blocks[0], b"a", 0)
    pool.cache(blocks[1], b"b", 0)
    pool.free(reversed(blocks))
    assert pool.free_list.ids() == [3, 4, 5, 6, 2, 1]
    assert ids(pool.allocate(4)) == [3, 4, 5, 6]
    assert pool.get_cached(b"b", 0) is blocks[1]
    assert ids(pool.allocate(1)) == [2]
    assert pool.get_cached(b"b", 0) is None
    assert pool.get_cached(b"a", 0) is blocks[0]


def test_uncached_blocks_freed_together_keep_their_order_at_the_head() -> None:
    pool = BlockPool(6, True)
    blocks = pool.allocate(3)
    pool.free(reversed(blocks))
    assert pool.free_list.ids() == [3, 2, 1, 4, 5]


def test_touching_a_free_block_takes_it_off_the_free_list() -> None:
    pool, chain = pool_with_cached_chain(6, 2)
    pool.touch(chain)
    assert pool.free_list.ids() == [3, 4, 5]
    assert [b.ref_count for b in chain] == [1, 1]
    pool.touch(chain[:1])
    pool.free(reversed(chain))
    assert [b.ref_count for b in chain] == [1, 0]
    assert pool.free_list.ids() == [3, 4, 5, 2]


def test_the_null_block_is_neither_touched_nor_freed() -> None:
    pool = BlockPool(3, True)
    pool.touch([pool.null_block])
    pool.free([pool.null_block])
    assert pool.null_block.ref_count == 0
    assert pool.num_free == 2


def test_equal_blocks_may_coexist_and_either_is_found() -> None:
    pool = BlockPool(4, True)
    first, second, _ = pool.allocate(3)
    pool.cache(first, b"k", 0)
    pool.cache(second, b"k", 0)
    assert pool.get_cached(b"k", 0) in (first, second)
    pool.free([first])
    assert pool.allocate(1) == [first]
    assert pool.get_cached(b"k", 0) is second


def test_groups_do_not_see_each_others_blocks() -> None:
    pool = BlockPool(3, True)
    (block,) = pool.allocate(1)
    pool.cache(block, b"k", 1)
    assert pool.get_cached(b"k", 0) is None
    assert pool.get_cached(b"k", 1) is block


def test_a_forgotten_block_is_not_found() -> None:
    pool, chain = pool_with_cached_chain(4, 2)
    pool.forget(chain[1])
    assert pool.get_cached(b"1", 0) is None
    assert pool.get_cached(b"0", 0) is chain[0]
    pool.forget(chain[1])


def test_reset_forgets_everything_once_no_block_is_taken() -> None:
    pool, chain = pool_with_cached_chain(4, 2)
    pool.touch(chain[:1])
    assert not pool.reset()
    assert pool.get_cached(b"0", 0) is chain[0]
    pool.free(chain[:1])
    assert pool.reset()
    assert pool.get_cached(b"0", 0) is None
    assert pool.num_free == 3
