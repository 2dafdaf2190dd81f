"""Which attention backend serves a layer."""

import torch

from vllm_clone.attention.backend import AttentionBackend
from vllm_clone.attention.cpu import CPUAttentionBackend
from vllm_clone.config.kv_cache import KVCacheSpec
from vllm_clone.errors import ConfigError

BACKENDS: tuple[type[AttentionBackend], ...] = (CPUAttentionBackend,)
"""In order of preference."""


def get_attention_backend(
    platform: str, spec: KVCacheSpec, dtype: torch.dtype, name: str | None = None
) -> AttentionBackend:
    """The first backend that supports the layer, or the one called ``name``.

    Args:
        platform: "cpu" or "cuda".
        spec: how the layer stores keys and values.
        dtype: of queries and activations.
        name: a backend's name; None chooses.

    Raises:
        ConfigError: no such backend, or none that can serve the layer; the message has every reason.
    """
    candidates = [b for b in BACKENDS if name is None or b.name == name.upper()]
    if not candidates:
        known = ", ".join(b.name for b in BACKENDS)
        raise ConfigError(f"unknown attention backend {name!r}; known backends: {known}")
    reasons = []
    for backend in candidates:
        reason = backend.supports(platform, spec, dtype)
        if reason is None:
            return backend()
        reasons.append(f"{backend.name}: {reason}")
    raise ConfigError(f"no attention backend for {spec} with {dtype}: {'; '.join(reasons)}")
