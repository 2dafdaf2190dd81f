"""One device of the engine: threads, weights, memory, and steps."""

import torch

from vllm_clone import envs, kernels
from vllm_clone.config import VllmConfig
from vllm_clone.config.kv_cache import KVCacheConfig, KVCacheSpec, group_layers
from vllm_clone.config.profiler import profiler_options
from vllm_clone.errors import ConfigError
from vllm_clone.model_loader.loader import load_model, weight_bytes
from vllm_clone.platforms import cpu, placement
from vllm_clone.step import ModelRunnerOutput, SchedulerOutput
from vllm_clone.worker.kv_cache import useful_bytes
from vllm_clone.worker.model_runner import ModelRunner
from vllm_clone.worker.profiler import StepProfiler

_DEFAULT_KV_BYTES = 4 << 30
_DEFAULT_KV_FRACTION = 0.4
_LARGEST_KV_FRACTION = 0.8
"""Of the available memory: the default's share, and the most it takes to fit one sequence of full length."""


class Worker:
    """Owns a device. Call in order: load_model, determine_available_memory, initialize_kv_cache, execute_model."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self.device = torch.device(config.device_config.device)
        if self.device.type == "cpu":
            # Our kernels have a pool of their own; a second one that spins at its barriers would fight it for the
            # cores. Only float16 goes through torch's matrix product.
            own = config.model_config.dtype != "float16"
            place = placement.plan(config.parallel_config)
            placement.apply(place)
            kernels.set_num_threads(place.num_threads)
            kernels.set_thread_cores(list(place.cores) if place.pinned else [])
            torch.set_num_threads(1 if own else place.num_threads)
        options = profiler_options(config.profiler_config)
        self._profiler = StepProfiler(options) if options is not None else None
        self.weight_bytes = 0
        self._runner: ModelRunner | None = None

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "load_model comes first"
        return self._runner

    def load_model(self) -> None:
        """Build the model and read its weights. Raises ConfigError or ModelLoadError."""
        model = load_model(self._config, self.device)
        self.weight_bytes = weight_bytes(model)
        self._runner = ModelRunner(self._config, model, self.device)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """What each attention layer stores, by layer name."""
        return self.runner.kv_cache_specs()

    def determine_available_memory(self) -> int:
        """Bytes the KV cache may have.

        ``--kv-cache-memory-bytes`` decides, else VLLM_CPU_KVCACHE_SPACE, else ``--gpu-memory-utilization`` when given
        (that share of all memory less what this process occupies), else what is sensible here: a part of the free
        memory, at least one sequence of full length if that fits, and never more than all sequences need.
        """
        cache = self._config.cache_config
        available = cpu.available_memory()
        if cache.kv_cache_memory_bytes is not None:
            asked, source = cache.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
        elif envs.VLLM_CPU_KVCACHE_SPACE:
            asked, source = int(envs.VLLM_CPU_KVCACHE_SPACE * (1 << 30)), "VLLM_CPU_KVCACHE_SPACE"
        elif cache.memory_share_given:
            share = int(cpu.total_memory() * cache.gpu_memory_utilization)
            asked, source = max(share - cpu.resident_memory(), 0), "--gpu-memory-utilization"
        else:
            return self._default_kv_bytes(available)
        if asked > available:
            raise ConfigError(
                f"{source} asks for {asked / 2**30:.2f} GiB of KV cache but only {available / 2**30:.2f} GiB of memory "
                "are available; ask for less or free memory."
            )
        return asked

    def _default_kv_bytes(self, available: int) -> int:
        max_model_len = self._config.model_config.max_model_len
        max_num_seqs = self._config.scheduler_config.max_num_seqs
        assert max_model_len is not None
        assert max_num_seqs is not None
        pool = KVCacheConfig(1, group_layers(self.kv_cache_specs()))
        one, all_ = (useful_bytes(pool, max_model_len, count) for count in (1, max_num_seqs))
        wanted = min(_DEFAULT_KV_BYTES, int(available * _DEFAULT_KV_FRACTION))
        wanted = max(wanted, min(one, int(available * _LARGEST_KV_FRACTION)))
        return min(wanted, all_)

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Allocate the pool and warm up."""
        self.runner.initialize_kv_cache(kv_cache)
        if kv_cache.num_blocks > 1:
            self.runner.warm_up()

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        result = self.runner.execute(step)
        if self._profiler is not None:
            self._profiler.step_done()
        return result

    def use_idle_time(self) -> bool:
        """Do a few milliseconds of what can be done ahead of requests; whether there is more."""
        return self.runner.use_idle_time()

    def profile(self, is_start: bool) -> None:
        """Begin a trace of steps, or end and write it."""
        if self._profiler is None:
            raise RuntimeError("--profiler-config was not given")
        if is_start:
            self._profiler.start()
        else:
            self._profiler.stop()
