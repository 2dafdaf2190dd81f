"""Linear layers whose matrices stay in the bits of a GGUF file."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from vllm_clone import kernels
from vllm_clone.hub.gguf import GGMLType
from vllm_clone.kernels import GGUFMatrix
from vllm_clone.layers.activation import GatedActivation
from vllm_clone.layers.gguf_rows import GGUFRows
from vllm_clone.layers.linear import LinearBase, LinearMethod, Part
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.packed_linear import PackedLinearMethod
from vllm_clone.layers.weights import check_shape

_TILE = 16
"""Packed matrices of one type whose rows are a multiple of this can be joined end to end."""


@dataclass(slots=True)
class StorageTypes:
    """Matrices of a model by storage type: those multiplied by as they are, and those that are not."""

    kept: Counter[str] = field(default_factory=Counter)
    dequantized: Counter[str] = field(default_factory=Counter)

    def summary(self, dtype: str) -> str:
        """One line for the log."""
        kept, dequantized = _listed(self.kept), _listed(self.dequantized)
        rest = (
            f"; dequantized to {dtype}, since there is no product for their type: {dequantized}" if dequantized else ""
        )
        return f"matrices kept as stored: {kept or 'none'}{rest}"


def _listed(types: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items()) if count)


class GGUFLinearMethod(PackedLinearMethod):
    """Each matrix of a layer is packed when it arrives, so that the file's bytes and the packed ones never both stay.

    ``prepare`` joins neighbours of one storage type; others stay apart, and their outputs are written side by side.
    A layer with a matrix whose type has no product holds plain numbers of the model's dtype instead.
    """

    def __init__(self, types: StorageTypes) -> None:
        self.types = types
        self._loaded: dict[int, GGUFMatrix | torch.Tensor] = {}  # by first local row
        self._matrices: list[GGUFMatrix] = []
        self._dtype = torch.float32

    def for_layer(self) -> LinearMethod:
        return GGUFLinearMethod(self.types)

    def create_weights(self, layer: LinearBase, options: BuildOptions) -> None:
        self._dtype = options.dtype
        layer.declare("weight", (0,), options, tuple(layer.outputs))

    def load(self, layer: LinearBase, name: str, tensor: torch.Tensor | GGUFRows, output: Part, offset: int) -> None:
        layer.parameter(name)
        check_shape((output.full, layer.input.full), tensor)
        if isinstance(tensor, torch.Tensor):
            self._loaded[offset] = tensor[output.slice, layer.input.slice].to(self._dtype)
            return
        rows = tensor.part(output.slice, layer.input.slice)
        if rows.ggml_type in kernels.GGUF_PACKABLE:
            packed = kernels.pack_gguf_linear(rows.bytes(), rows.ggml_type, rows.shape)
            self.types.kept[rows.ggml_type.name] += 1
            self._loaded[offset] = GGUFMatrix(packed, rows.ggml_type, output.size)
        else:
            self.types.dequantized[rows.ggml_type.name] += 1
            self._loaded[offset] = rows.dequantize(self._dtype)

    def prepare(self, layer: LinearBase) -> None:
        parts = [self._loaded[offset] for offset in sorted(self._loaded)]
        self._loaded.clear()
        packed = [part for part in parts if isinstance(part, GGUFMatrix)]
        if len(packed) < len(parts):
            for part in packed:
                self.types.kept[GGMLType(part.ggml_type).name] -= 1
                self.types.dequantized[GGMLType(part.ggml_type).name] += 1
            plain = [self._expand(layer, part) if isinstance(part, GGUFMatrix) else part for part in parts]
            weight = torch.cat(plain)
            layer.parameter("weight").data = kernels.pack_linear(weight) if kernels.can_pack_linear(weight) else weight
            return
        for i, matrix in enumerate(_join(packed)):
            parameter = nn.Parameter(matrix.packed, requires_grad=False)
            layer.register_parameter(f"weight_{i}" if i else "weight", parameter)
            self._matrices.append(matrix._replace(packed=parameter))

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self._matrices:
            return super().apply(layer, x, bias)
        return kernels.gguf_linear(x, self._matrices, bias)

    def apply_gated(
        self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
    ) -> torch.Tensor:
        if not self._matrices:
            return super().apply_gated(layer, x, bias, activation)
        return activation(self.apply(layer, x, bias))

    def logits(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        if not self._matrices:
            return super().logits(layer, x)
        return kernels.gguf_linear(x, self._matrices, None, torch.float32)

    def matrix(self, layer: LinearBase) -> torch.Tensor:
        if not self._matrices:
            return super().matrix(layer)
        return torch.cat([self._expand(layer, matrix) for matrix in self._matrices])

    def embed(self, layer: LinearBase, ids_T: torch.Tensor) -> torch.Tensor:
        if not self._matrices:
            return super().embed(layer, ids_T)
        (matrix,) = self._matrices
        return kernels.gguf_rows(matrix.packed, matrix.ggml_type, layer.in_features, ids_T, torch.float32)

    def _expand(self, layer: LinearBase, matrix: GGUFMatrix) -> torch.Tensor:
        rows = torch.arange(matrix.num_outputs)
        return kernels.gguf_rows(matrix.packed, matrix.ggml_type, layer.in_features, rows, self._dtype)


def _join(matrices: list[GGUFMatrix]) -> list[GGUFMatrix]:
    """Neighbours of one type as one matrix, where the packed order allows it."""
    ends = [
        i
        for i, (above, below) in enumerate(pairwise(matrices), 1)
        if above.ggml_type != below.ggml_type or above.num_outputs % _TILE
    ]
    groups = [matrices[first:end] for first, end in pairwise([0, *ends, len(matrices)])]
    return [
        GGUFMatrix(_end_to_end([m.packed for m in group]), group[0].ggml_type, sum(m.num_outputs for m in group))
        for group in groups
    ]


def _end_to_end(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    joined = kernels.empty_weight((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype)
    return torch.cat(parts, out=joined)
