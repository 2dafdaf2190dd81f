import os
import threading

import pytest
import torch

from tests.worker.fakes import FakeModel, make_config
from vllm_clone import kernels
from vllm_clone.config.kv_cache import KVCacheConfig, group_layers
from vllm_clone.errors import ConfigError
from vllm_clone.platforms import cpu
from vllm_clone.worker import worker as worker_module
from vllm_clone.worker.kv_cache import bind_kv_cache, useful_bytes
from vllm_clone.worker.worker import Worker

GIB = 1 << 30


@pytest.fixture
def make_worker(monkeypatch):
    """A worker with the fake model; threads stay as they are."""
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(kernels, "set_num_threads", lambda n: None)
    monkeypatch.setattr(worker_module, "load_model", lambda config, device: FakeModel())
    monkeypatch.setattr(worker_module, "weight_bytes", lambda model: 123)

    def make(available, **cache):
        monkeypatch.setattr(cpu, "available_memory", lambda: available)
        config = make_config()
        config.device_config.device = "cpu"
        for name, value in cache.items():
            setattr(config.cache_config, name, value)
        worker = Worker(config)
        worker.load_model()
        return worker

    return make


def full_size(worker):
    """All sequences at full length: 8 sequences × 50 blocks × 2 groups, and the null block."""
    pool = KVCacheConfig(1, group_layers(worker.kv_cache_specs()))
    return (8 * 50 * 2 + 1) * pool.bytes_per_block


def test_the_weights_size_is_reported(make_worker):
    assert make_worker(GIB).weight_bytes == 123


def test_the_cache_is_no_larger_than_all_sequences_need(make_worker):
    worker = make_worker(64 * GIB)
    assert worker.determine_available_memory() == full_size(worker)


def test_the_default_is_a_part_of_the_free_memory(make_worker):
    worker = make_worker(GIB)
    worker._config.model_config.max_model_len = 5_000_000
    assert worker.determine_available_memory() == pytest.approx(0.4 * GIB, rel=0.01)


def test_one_full_sequence_fits_where_memory_allows(make_worker):
    worker = make_worker(GIB)
    worker._config.model_config.max_model_len = 40_000_000
    pool = KVCacheConfig(1, group_layers(worker.kv_cache_specs()))
    assert useful_bytes(pool, 40_000_000, 1) == pytest.approx(0.6 * GIB, rel=0.02)
    assert worker.determine_available_memory() == useful_bytes(pool, 40_000_000, 1)


def test_the_environment_sets_the_size(make_worker, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert make_worker(2 * GIB).determine_available_memory() == GIB // 2


def test_the_flag_wins_over_the_environment(make_worker, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert make_worker(2 * GIB, kv_cache_memory_bytes=1000).determine_available_memory() == 1000


def test_a_given_share_counts_from_all_memory_less_what_the_process_occupies(make_worker, monkeypatch):
    monkeypatch.setattr(cpu, "total_memory", lambda: 4 * GIB)
    monkeypatch.setattr(cpu, "resident_memory", lambda: GIB // 2)
    worker = make_worker(3 * GIB, gpu_memory_utilization=0.5, memory_share_given=True)
    assert worker.determine_available_memory() == 4 * GIB * 0.5 - GIB // 2


def test_a_size_beyond_the_memory_is_refused_with_both_numbers(make_worker, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE asks for 8\.00 GiB .* only 2\.00 GiB"):
        make_worker(2 * GIB).determine_available_memory()


def test_layers_of_different_groups_share_a_tensor():
    model = FakeModel()
    specs = {name: layer.kv_cache_spec(4, "float32") for name, layer in model.attention_layers().items()}
    config = KVCacheConfig(10, group_layers(specs))
    bind_kv_cache(model.attention_layers(), config, torch.device("cpu"))
    full, sliding = (model.layers[name].kv_cache for name in ("full", "sliding"))
    assert full.shape == (10, 2, 1, 4, 1)
    assert full.data_ptr() == sliding.data_ptr()


def test_torchs_threads_follow_the_environment_where_torch_does_the_work(make_worker, monkeypatch):
    chosen, own = [], []
    monkeypatch.setenv("VLLM_CPU_THREADS", "3")
    monkeypatch.setattr(cpu, "num_usable_cores", lambda: 7)
    config = make_worker(GIB)._config
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(kernels, "set_num_threads", own.append)
    config.model_config.dtype = "float16"
    Worker(config)
    monkeypatch.delenv("VLLM_CPU_THREADS")
    Worker(config)
    config.model_config.dtype = "bfloat16"
    Worker(config)
    assert chosen == [3, 7, 1]
    assert own == [3, 7, 7]


def test_the_worker_goes_where_it_is_placed(monkeypatch):
    core, pinned = max(os.sched_getaffinity(0)), []
    monkeypatch.setattr(kernels, "set_num_threads", lambda count: None)
    monkeypatch.setattr(kernels, "set_thread_cores", pinned.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(core))
    config = make_config()
    config.device_config.device = "cpu"
    places = []

    def start():
        Worker(config)
        places.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=start)  # one of its own, whose cores end with it
    thread.start()
    thread.join()
    assert (places, pinned) == ([{core}], [[core]])
