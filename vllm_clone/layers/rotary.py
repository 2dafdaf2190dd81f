"""Rotary position embeddings and the ways of stretching them to longer contexts.

Frequencies and tables are float32 whatever the model's dtype: in bfloat16 a position above 256 has no exact angle.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm_clone import kernels
from vllm_clone.errors import ModelLoadError


@dataclass(frozen=True)
class RopeConfig:
    """One kind of rotary embedding, as config.json describes it.

    ``parameters`` holds what the type needs beyond theta (``factor``, ``beta_fast`` …), by config.json's names.
    """

    head_size: int
    theta: float = 10000.0
    rope_type: str = "default"
    rotary_dim: int = 0
    """Leading elements of a head that rotate; 0 for all of them."""
    max_position: int = 2048
    """The config's max_position_embeddings."""
    is_neox: bool = True
    """Pairs are (i, i + rotary_dim / 2), not neighbours."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    freq_factors: tuple[float, ...] | None = None
    """Divisors of the frequencies that a GGUF file carries in place of a rope type."""

    @property
    def dim(self) -> int:
        return self.rotary_dim or self.head_size

    def number(self, key: str, default: float | None = None) -> float:
        """A numeric parameter. Raises ModelLoadError when it is missing without default or no number."""
        value = self.parameters.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(
                f"rope type {self.rope_type!r} needs a number {key!r} in rope_parameters, found {value!r}"
            )
        return float(value)


def _frequencies(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _default(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    return _frequencies(rope.theta, rope.dim), 1.0


def _linear(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Positions shrink by ``factor``."""
    return _frequencies(rope.theta, rope.dim) / rope.number("factor"), 1.0


def _dynamic(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """NTK-aware base for the longest sequence the factor allows.

    The cache keeps rotated keys, so the base cannot follow the sequence as it grows: it is set for the end.
    """
    factor, dim = rope.number("factor"), rope.dim
    stretch = factor * factor - (factor - 1)
    return _frequencies(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Long wavelengths are divided by ``factor``, short ones kept, those between blended."""
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.number("original_max_position_embeddings", rope.max_position)
    frequencies = _frequencies(rope.theta, rope.dim)
    wavelengths = 2 * math.pi / frequencies
    keep = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / factor + keep * frequencies, 1.0


def _yarn(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): blend by number of rotations, and scale cos and sin by the attention factor."""
    dim, theta = rope.dim, rope.theta
    original = rope.number("original_max_position_embeddings", rope.max_position)
    factor = rope.number("factor", rope.max_position / original)

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(rope.number("beta_fast", 32)), dim_of(rope.number("beta_slow", 1))
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolate = ramp.clamp(0, 1)
    frequencies = _frequencies(theta, dim)
    return frequencies / factor * interpolate + frequencies * (1 - interpolate), _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    if rope.parameters.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    return mscale(over) / mscale(under) if over and under else mscale(1.0)


ROPE_TYPES: dict[str, Callable[[RopeConfig], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""rope_type → function that gives the frequencies [dim / 2] and the factor on cos and sin."""


def cos_sin_table(rope: RopeConfig, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, dim]: cosines in the first half of each row, sines in the second.

    Raises:
        ModelLoadError: unknown rope type or missing parameter.
    """
    if rope.rope_type not in ROPE_TYPES:
        raise ModelLoadError(f"unknown rope type {rope.rope_type!r}; known types: {', '.join(ROPE_TYPES)}")
    frequencies, scale = ROPE_TYPES[rope.rope_type](rope)
    if rope.freq_factors is not None:
        if len(rope.freq_factors) != len(frequencies):
            raise ModelLoadError(f"expected {len(frequencies)} rope frequency factors, found {len(rope.freq_factors)}")
        frequencies = frequencies / torch.tensor(rope.freq_factors)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions. Layers with equal settings share one object."""

    table: torch.Tensor

    def __init__(self, rope: RopeConfig, num_positions: int, device: torch.device) -> None:
        super().__init__()
        self.rope = rope
        self.register_buffer("table", cos_sin_table(rope, num_positions).to(device), persistent=False)

    def forward(self, positions_T: torch.Tensor, q_T_HD: torch.Tensor, k_T_KD: torch.Tensor) -> None:
        """Rotate ``q_T_HD`` and ``k_T_KD`` in place; rows may be strided."""
        kernels.rotary_embedding_(positions_T, q_T_HD, k_T_KD, self.table, self.rope.head_size, self.rope.is_neox)

    def at(self, positions_T: torch.Tensor) -> kernels.Rotary:
        """The same rotation, for the attention layer to apply on the way."""
        return kernels.Rotary(positions_T, self.table, self.rope.is_neox)
