"""`vllm serve --dry-run`: every setting, where its value comes from, and the memory it would take."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_clone.config import FrontendConfig, VllmConfig
from vllm_clone.config.flags import FlagSpec, flags_of
from vllm_clone.config.kv_cache import KV_DTYPES
from vllm_clone.engine.arg_utils import REASONS, EngineArgs
from vllm_clone.hub.files import weight_files
from vllm_clone.platforms.cpu import available_memory

Sources = Mapping[str, str]
"""Flag field → the place it was given."""


def report(args: EngineArgs, config: VllmConfig, frontend: FrontendConfig, sources: Sources) -> str:
    """The page: one line per setting, then memory."""
    lines = [*_group("frontend", frontend, None, sources)]
    before = args.unresolved()
    for group in dataclasses.fields(VllmConfig):
        value = getattr(config, group.name)
        if dataclasses.is_dataclass(value):
            lines += _group(group.name, value, getattr(before, group.name), sources)
    lines += _group("", config, before, sources)
    width = max(len(name) for name, _, _ in lines)
    shown = [f"{name:<{width}}  {value}  ({source})" for name, value, source in lines]
    return "\n".join([*shown, "", *_memory(config)])


def _group(group: str, now: Any, before: Any, sources: Sources) -> Iterator[tuple[str, str, str]]:
    flags = {spec.field: spec for spec in flags_of(type(now))}
    fresh = type(now)()
    for field in dataclasses.fields(now):
        value = getattr(now, field.name)
        if dataclasses.is_dataclass(value):
            continue
        if (before is not None and value != getattr(before, field.name)) or not field.metadata:
            source = f"derived: {REASONS[field.name]}"
        elif field.name in sources:
            source = sources[field.name]
        else:  # a key of the group's JSON flag, or not given
            source = sources.get(group, "default") if value != getattr(fresh, field.name) else "default"
        yield f"{group}.{field.name}".lstrip("."), _shown(value, flags.get(field.name)), source


def _shown(value: Any, spec: FlagSpec | None) -> str:
    if spec is not None and spec.secret and value is not None:
        return "***"
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else text[:97] + "..."


def _memory(config: VllmConfig) -> list[str]:
    model = config.model_config
    length, seqs = model.max_model_len or 0, config.scheduler_config.max_num_seqs or 0
    weights = sum(file.stat().st_size for file in weight_files(model.path))
    lines = [f"memory: {_mib(weights)} of weight files, {_mib(available_memory())} available"]
    per_token = kv_bytes_per_token(model.hf_config, config.cache_config.kv_cache_dtype)
    if per_token:
        asked = config.cache_config.kv_cache_memory_bytes
        planned = f", --kv-cache-memory-bytes takes {_mib(asked)}" if asked else ""
        lines.append(
            f"KV cache: {per_token} bytes a token, {_mib(per_token * length)} for one request of {length} tokens, "
            f"{_mib(per_token * length * seqs)} for all {seqs}{planned}"
        )
    return lines


def kv_bytes_per_token(hf: Mapping[str, Any], dtype: str) -> int:
    """Bytes of keys and values that all layers keep of one token; 0 when config.json does not tell."""
    layers = hf.get("num_hidden_layers") or hf.get("n_layer")
    heads = hf.get("num_attention_heads") or hf.get("n_head")
    hidden = hf.get("hidden_size") or hf.get("n_embd")
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return 0
    if min(layers, heads, hidden) < 1 or dtype not in KV_DTYPES:
        return 0
    kv_heads = hf.get("num_key_value_heads") or heads
    head_dim = hf.get("head_dim") or hidden // heads
    element = KV_DTYPES[dtype]
    return int(2 * layers * kv_heads * (head_dim * element.num_bytes + element.scale_bytes))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
