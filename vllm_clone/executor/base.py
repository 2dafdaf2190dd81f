"""How the engine reaches its workers, wherever they run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_clone.config import VllmConfig
from vllm_clone.config.kv_cache import KVCacheConfig, KVCacheSpec
from vllm_clone.step import ModelRunnerOutput, SchedulerOutput


class Executor(ABC):
    """Runs steps on one or more workers. Methods are called from one thread, in the order they stand here."""

    weight_bytes: int = 0
    """Memory of the loaded weights on all workers."""

    @abstractmethod
    def __init__(self, config: VllmConfig) -> None: ...

    @abstractmethod
    def load_model(self) -> None:
        """Read the weights. Raises ConfigError or ModelLoadError."""

    @abstractmethod
    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """What each attention layer stores, by layer name in order of execution."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Bytes each worker may use for the KV cache. Raises ConfigError when a requested size does not fit."""

    @abstractmethod
    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Allocate the KV cache and get ready for steps."""

    @abstractmethod
    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and wait for its result."""

    def use_idle_time(self) -> bool:
        """Do a few milliseconds of what can be done ahead of requests; whether there is more to do."""
        return False

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker by name; their answers.

        Raises:
            AttributeError: the workers have no such method.
            RuntimeError: there are no workers to be called.
        """
        raise RuntimeError("this executor has no workers that can be called")

    @abstractmethod
    def check_health(self) -> None:
        """Return when every worker can take a step. Raises RuntimeError when one cannot."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release workers and their memory; later calls do nothing."""
