"""Activation functions by the names config.json uses."""

from collections.abc import Callable
from functools import partial

import torch

from vllm_clone import kernels
from vllm_clone.errors import ModelLoadError

Activation = Callable[[torch.Tensor], torch.Tensor]

_GATED: dict[str, Activation] = {
    "silu": lambda x: kernels.silu_and_mul(x),
    "swish": lambda x: kernels.silu_and_mul(x),
    "gelu": lambda x: kernels.gelu_and_mul(x, approximate="none"),
    "gelu_new": lambda x: kernels.gelu_and_mul(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: kernels.gelu_and_mul(x, approximate="tanh"),
}
_PLAIN: dict[str, Activation] = {
    "gelu": lambda x: kernels.gelu(x, approximate="none"),
    "gelu_new": lambda x: kernels.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: kernels.gelu(x, approximate="tanh"),
    "relu": kernels.relu,
    "silu": kernels.silu,
}


def _find(table: dict[str, Activation], name: str) -> Activation:
    if name not in table:
        raise ModelLoadError(f"unknown activation {name!r}; known: {', '.join(table)}")
    return table[name]


gated_activation: Callable[[str], Activation] = partial(_find, _GATED)
"""name → function from [T, 2F] (gate | up) to activation(gate) × up, [T, F]; ModelLoadError for unknown names."""

activation: Callable[[str], Activation] = partial(_find, _PLAIN)
"""name → elementwise function; ModelLoadError for unknown names."""
