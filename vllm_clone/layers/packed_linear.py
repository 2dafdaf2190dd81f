"""Linear layers on the CPU: weights packed as they are read, multiplied by this package's own kernels."""

from itertools import pairwise

import torch

from vllm_clone import kernels
from vllm_clone.layers.activation import GatedActivation
from vllm_clone.layers.gguf_rows import GGUFRows
from vllm_clone.layers.linear import LinearBase, Part, UnquantizedLinearMethod
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.weights import check_plain, check_shape

_CHUNK_BYTES = 4 << 20
"""What is converted or gathered at a time before it is packed: stays in the cache, and adds nothing to peak memory."""


class PackedLinearMethod(UnquantizedLinearMethod):
    """The matrix in the order in which the kernel streams it, written there straight from the checkpoint's tensors.

    A matrix the kernel cannot take (float16, odd width) stays as it is and goes through torch.
    """

    def create_weights(self, layer: LinearBase, options: BuildOptions) -> None:
        packed = kernels.packed_linear_shape(layer.out_features, layer.in_features, options.dtype)
        if packed is None:
            super().create_weights(layer, options)
        else:
            layer.declare("weight", packed, options, tuple(layer.outputs))
            if layer.out_features % 32:  # the last tile has rows that no tensor fills
                layer.parameter("weight")[-1].zero_()

    def load(self, layer: LinearBase, name: str, tensor: torch.Tensor | GGUFRows, output: Part, offset: int) -> None:
        weight = layer.parameter(name)
        if weight.dim() == 2:
            super().load(layer, name, tensor, output, offset)
            return
        check_shape((output.full, layer.input.full), tensor)
        if not isinstance(tensor, torch.Tensor):
            tensor = tensor.dequantize(weight.dtype)
        check_plain(tensor)
        rows = tensor[output.slice, layer.input.slice]
        step = max(_CHUNK_BYTES // (layer.in_features * weight.itemsize) // 32 * 32, 32)
        first = -offset % 32 if offset % 32 else step  # so that chunks end where tiles do
        for start, end in pairwise([0, *range(first, output.size, step), output.size]):
            kernels.pack_linear_rows(weight, offset + start, rows[start:end].to(weight.dtype).contiguous())

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
        return kernels.packed_rows(layer.weight, ids_T, torch.float32)
