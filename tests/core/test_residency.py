"""--kv-cache-metrics: the lives of sampled blocks."""

import itertools

import pytest

from tests.core.test_engine_core import request
from tests.engine.fakes import FakeExecutor, fake_config
from vllm_clone.core.engine_core import EngineCore
from vllm_clone.core.kv_cache.block_pool import BlockPool
from vllm_clone.core.kv_cache.hashing import BlockHash
from vllm_clone.core.kv_cache.residency import Residency
from vllm_clone.messages import KVEviction


def test_a_life_runs_from_allocation_to_overwriting_and_counts_gaps_between_uses():
    now = [0.0]
    residency = Residency(1.0, lambda: now[0], lambda: 0.0)
    pool = BlockPool(2, True, residency)
    (block,) = pool.allocate(1)
    pool.cache(block, BlockHash(b"x"), 0)
    pool.free([block])
    for now[0] in (3.0, 5.0):
        pool.touch([block])
        pool.free([block])
    now[0] = 9.0
    assert pool.allocate(1) == [block]
    assert residency.take() == [KVEviction(9.0, 4.0, [3.0, 2.0])]
    assert residency.take() == []


def test_blocks_that_cache_nothing_are_not_evicted():
    residency = Residency(1.0, lambda: 0.0, lambda: 0.0)
    pool = BlockPool(2, True, residency)
    pool.free(pool.allocate(1))
    pool.allocate(1)
    assert residency.take() == []


@pytest.mark.parametrize(("share", "followed"), [(0.25, 1), (0.5, 2), (1.0, 4)])
def test_only_a_share_is_followed(share: float, followed: int):
    chances = itertools.cycle([0.0, 0.3, 0.6, 0.9])
    residency = Residency(share, lambda: 0.0, lambda: next(chances))
    pool = BlockPool(5, True, residency)
    blocks = pool.allocate(4)
    for i, block in enumerate(blocks):
        pool.cache(block, BlockHash(bytes([i])), 0)
    pool.free(blocks)
    pool.allocate(4)
    assert len(residency.take()) == followed


def test_the_engine_reports_evictions_when_asked_to():
    config = fake_config(num_blocks=8, max_model_len=100)
    config.observability_config.kv_cache_metrics = True
    config.observability_config.kv_cache_metrics_sample = 1.0
    core = EngineCore(config, FakeExecutor)
    seen = []
    for i in range(3):
        core.add_request(request(f"r{i}", prompt=[97 + i] * 90))
        while core.has_work:
            stats = core.step()[0].scheduler_stats
            assert stats is not None
            seen += stats.kv_evictions
    assert seen
    assert all(0 <= e.idle <= e.lifetime for e in seen)
