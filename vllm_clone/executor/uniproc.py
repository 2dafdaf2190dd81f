"""One worker, inside the engine's process."""

from vllm_clone.config import VllmConfig
from vllm_clone.config.kv_cache import KVCacheConfig, KVCacheSpec
from vllm_clone.config.named_code import import_named
from vllm_clone.executor.base import Executor
from vllm_clone.step import ModelRunnerOutput, SchedulerOutput
from vllm_clone.worker.worker import Worker


class UniProcExecutor(Executor):
    """Calls its worker directly."""

    def __init__(self, config: VllmConfig) -> None:
        named = config.parallel_config.worker_cls
        worker_class: type[Worker] = Worker if named == "auto" else import_named("--worker-cls", named)
        self._worker: Worker | None = worker_class(config)

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor is shut down")
        return self._worker

    def load_model(self) -> None:
        self.worker.load_model()
        self.weight_bytes = self.worker.weight_bytes

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.worker.kv_cache_specs()

    def determine_available_memory(self) -> int:
        return self.worker.determine_available_memory()

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        self.worker.initialize_kv_cache(kv_cache)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.worker.execute_model(step)

    def check_health(self) -> None:
        # The worker is this process: whoever can call this finds it alive, unless it was shut down.
        _ = self.worker

    def shutdown(self) -> None:
        self._worker = None
