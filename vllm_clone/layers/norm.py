"""Normalisation layers."""

import torch

from vllm_clone import kernels
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.weights import WeightModule


class RMSNorm(WeightModule):
    """x / rms(x) × (weight + weight_offset) over the last axis, computed in float32.

    x is in the model's dtype, like the result, or is the residual stream in float32.

    Args:
        size: of the last axis.
        eps: added to the mean square.
        weight_offset: 1.0 for Gemma, whose checkpoints store weight − 1.
    """

    weight: torch.Tensor

    def __init__(self, size: int, eps: float, options: BuildOptions, weight_offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        self.declare("weight", (size,), options)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Normalised copy of [T, D]."""
        return kernels.rms_norm(x_TD, self.weight, self.eps, weight_offset=self.weight_offset)

    def add(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        """Add ``x_TD`` to the residual stream in place and return the normalised sum, in x's memory."""
        kernels.fused_add_rms_norm(x_TD, residual_TD, self.weight, self.eps, weight_offset=self.weight_offset)
        return x_TD

    def heads_(self, x_T_HD: torch.Tensor) -> None:
        """Normalise each head of [T, H·D] on its own, in place; D is this norm's size, rows may be strided."""
        kernels.rms_norm_heads_(x_T_HD, self.weight, self.eps, weight_offset=self.weight_offset)


class LayerNorm(WeightModule):
    """(x − mean) / std × weight + bias over the last axis; x as for :class:`RMSNorm`."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, size: int, eps: float, options: BuildOptions) -> None:
        super().__init__()
        self.eps = eps
        self.declare("weight", (size,), options)
        self.declare("bias", (size,), options)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Normalised copy of [T, D]."""
        return kernels.layer_norm(x_TD, self.weight, self.bias, self.eps)
