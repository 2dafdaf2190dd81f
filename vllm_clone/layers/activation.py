"""Activation functions by the names config.json uses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from vllm_clone import kernels
from vllm_clone.errors import ModelLoadError

Activation = Callable[[torch.Tensor], torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """From [T, 2F] (gate | up) to activation(gate) × up, [T, F]; ``kind`` is what kernels call the function."""

    kind: Literal["silu", "gelu", "gelu_tanh"]

    def __call__(self, x_T2F: torch.Tensor) -> torch.Tensor:
        if self.kind == "silu":
            return kernels.silu_and_mul(x_T2F)
        return kernels.gelu_and_mul(x_T2F, approximate="tanh" if self.kind == "gelu_tanh" else "none")


_GATED = {
    "silu": GatedActivation("silu"),
    "swish": GatedActivation("silu"),
    "gelu": GatedActivation("gelu"),
    "gelu_new": GatedActivation("gelu_tanh"),
    "gelu_pytorch_tanh": GatedActivation("gelu_tanh"),
}
_PLAIN: dict[str, Activation] = {
    "gelu": lambda x: kernels.gelu(x, approximate="none"),
    "gelu_new": lambda x: kernels.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: kernels.gelu(x, approximate="tanh"),
    "relu": kernels.relu,
    "silu": kernels.silu,
}


def _find(table: dict[str, T], name: str) -> T:
    if name not in table:
        raise ModelLoadError(f"unknown activation {name!r}; known: {', '.join(table)}")
    return table[name]


def gated_activation(name: str) -> GatedActivation:
    """The function for a gated MLP. Raises ModelLoadError for unknown names."""
    return _find(_GATED, name)


def activation(name: str) -> Activation:
    """An elementwise function. Raises ModelLoadError for unknown names."""
    return _find(_PLAIN, name)
