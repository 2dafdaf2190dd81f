"""Linear layers on the CPU: weights repacked at load, multiplied by this package's own kernels."""

import torch

from vllm_clone import kernels
from vllm_clone.layers.activation import GatedActivation
from vllm_clone.layers.linear import LinearBase, UnquantizedLinearMethod


class PackedLinearMethod(UnquantizedLinearMethod):
    """Loads like an unquantized matrix; ``prepare`` replaces it by the kernel's order of the same numbers.

    A matrix the kernel cannot take (float16, odd width) stays as it is and goes through torch.
    """

    def prepare(self, layer: LinearBase) -> None:
        weight = layer.parameter("weight")
        if weight.dim() == 2 and kernels.can_pack_linear(weight):
            weight.data = kernels.pack_linear(weight.data)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = layer.weight
        if weight.dim() == 2:
            return super().apply(layer, x, bias)
        return kernels.linear(x, weight, layer.out_features, bias)

    def apply_gated(
        self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
    ) -> torch.Tensor:
        if layer.weight.dim() == 2:
            return super().apply_gated(layer, x, bias, activation)
        return kernels.gated_linear(x, layer.weight, layer.out_features, bias, activation.kind)

    def logits(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        if layer.weight.dim() == 2:
            return super().logits(layer, x)
        return kernels.linear(x, layer.weight, layer.out_features, None, torch.float32)

    def matrix(self, layer: LinearBase) -> torch.Tensor:
        if layer.weight.dim() == 2:
            return layer.weight
        return kernels.packed_rows(layer.weight, torch.arange(layer.out_features))

    def embed(self, layer: LinearBase, ids_T: torch.Tensor) -> torch.Tensor:
        if layer.weight.dim() == 2:
            return super().embed(layer, ids_T)
        return kernels.packed_rows(layer.weight, ids_T)
