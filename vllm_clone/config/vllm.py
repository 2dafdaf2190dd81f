"""VllmConfig: everything the engine is built from, resolved once and passed down."""

import dataclasses
import hashlib
from dataclasses import dataclass, field

import msgspec

from vllm_clone.config.groups import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)


@dataclass(frozen=True)
class VllmConfig:
    """All engine groups. Built by ``EngineArgs.create_engine_config``; not changed afterwards."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> "VllmConfig":
        return msgspec.json.decode(data, type=VllmConfig)

    def compute_hash(self) -> str:
        """Ten hex digits that depend on every value; equal configurations give equal digits everywhere."""
        return hashlib.sha256(msgspec.json.encode(dataclasses.asdict(self), order="sorted")).hexdigest()[:10]


ENGINE_GROUPS: dict[str, type] = {f.name: f.default_factory for f in dataclasses.fields(VllmConfig)}  # type: ignore[misc]
"""Field name of VllmConfig → config class."""
