"""What a step costs by the model's shape: operations and bytes, for --enable-mfu-metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_clone.config.kv_cache import KVCacheConfig


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one step; operations count a multiplication and an addition as two."""

    flops: float
    read_bytes: float
    write_bytes: float


class CostModel:
    """Counts matrix products and attention; norms, activations and sampling are small beside them.

    Args:
        hf: config.json of a decoder.
        kv_cache: tells the bytes that a token's keys and values take.
        weight_bytes: read once a step.

    Raises:
        KeyError: config.json does not state the shape.
    """

    def __init__(self, hf: Mapping[str, Any], kv_cache: KVCacheConfig, weight_bytes: int) -> None:
        hidden = _first(hf, "hidden_size", "n_embd")
        layers = _first(hf, "num_hidden_layers", "n_layer")
        heads = _first(hf, "num_attention_heads", "n_head")
        kv_heads = hf.get("num_key_value_heads") or heads
        head_dim = hf.get("head_dim") or hidden // heads
        inner = hf.get("intermediate_size") or hf.get("n_inner") or 4 * hidden
        matrices = 2 if "n_embd" in hf else 3  # a gate beside up and down
        per_layer = hidden * head_dim * 2 * (heads + kv_heads) + matrices * hidden * inner
        self._per_token = 2 * layers * per_layer
        self._per_row = 2 * hidden * _first(hf, "vocab_size")
        self._per_pair = 4 * layers * heads * head_dim
        self._weight_bytes = weight_bytes
        groups = kv_cache.groups
        self._kv_bytes = sum(len(g.layer_names) * g.spec.page_size_bytes / g.spec.block_size for g in groups)

    def step(self, spans: Iterable[tuple[int, int]]) -> StepCost:
        """Of a step that computes positions ``start`` up to ``end`` of each sequence; one row each gets scores."""
        tokens = pairs = rows = context = 0
        for start, end in spans:
            count = end - start
            tokens += count
            pairs += count * start + count * (count + 1) // 2
            context += end
            rows += 1
        if not rows:
            return StepCost(0, 0, 0)
        flops = tokens * self._per_token + rows * self._per_row + pairs * self._per_pair
        return StepCost(flops, self._weight_bytes + context * self._kv_bytes, tokens * self._kv_bytes)


def _first(hf: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(hf.get(name), int):
            return int(hf[name])
    raise KeyError(names[0])
