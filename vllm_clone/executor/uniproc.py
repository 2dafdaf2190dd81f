"""One worker, inside the engine's process."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_clone.config import VllmConfig
from vllm_clone.config.kv_cache import KVCacheConfig, KVCacheSpec
from vllm_clone.config.named_code import import_named
from vllm_clone.errors import ConfigError
from vllm_clone.executor.base import Executor
from vllm_clone.step import ModelRunnerOutput, SchedulerOutput
from vllm_clone.worker.worker import Worker


def extended(worker_class: type[Worker], name: str) -> type[Worker]:
    """The worker class with the methods of the class that ``--worker-extension-cls`` names; "" names none.

    Raises:
        ConfigError: it cannot be imported, or brings something the worker has already.
    """
    if not name:
        return worker_class
    extension = import_named("--worker-extension-cls", name)
    if not isinstance(extension, type):
        raise ConfigError(f"--worker-extension-cls {name}: is no class.")
    for attribute in dir(extension):
        if not attribute.startswith("__") and hasattr(worker_class, attribute):
            raise ConfigError(f"--worker-extension-cls {name}: the worker has {attribute} already; rename it.")
    return type(worker_class.__name__, (worker_class, extension), {})


class UniProcExecutor(Executor):
    """Calls its worker directly."""

    def __init__(self, config: VllmConfig) -> None:
        named = config.parallel_config.worker_cls
        worker_class: type[Worker] = Worker if named == "auto" else import_named("--worker-cls", named)
        extension = config.parallel_config.worker_extension_cls
        self._worker: Worker | None = extended(worker_class, extension)(config)

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

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    def use_idle_time(self) -> bool:
        return self.worker.use_idle_time()

    def check_health(self) -> None:
        # The worker is this process: whoever can call this finds it alive, unless it was shut down.
        _ = self.worker

    def shutdown(self) -> None:
        self._worker = None
