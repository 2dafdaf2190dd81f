"""Linear layers: how the ranks divide a matrix (the classes), and how it is stored and multiplied (the method)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.activation import GatedActivation
from vllm_clone.layers.gguf_rows import GGUFRows
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.weights import WeightModule, check_shape, copy_checked


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's share of one axis: ``size`` of the ``full`` elements, from ``start``."""

    full: int
    start: int
    size: int

    @classmethod
    def whole(cls, full: int) -> "Part":
        return cls(full, 0, full)

    @classmethod
    def split(cls, full: int, rank: int, size: int, what: str) -> "Part":
        """An equal share. Raises ModelLoadError when ``full`` cannot be divided."""
        if full % size:
            raise ModelLoadError(f"{what} ({full}) cannot be divided by the tensor parallel size {size}")
        return cls(full, full // size * rank, full // size)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)


class LinearMethod(ABC):
    """How a linear layer keeps its matrix and multiplies by it."""

    def for_layer(self) -> "LinearMethod":
        """The object that serves one layer: this one, unless something must be remembered about each layer."""
        return self

    @abstractmethod
    def create_weights(self, layer: "LinearBase", options: BuildOptions) -> None:
        """Declare the parameters for ``layer.out_features`` × ``layer.in_features``, stacked from ``layer.outputs``."""

    @abstractmethod
    def load(self, layer: "LinearBase", name: str, tensor: torch.Tensor | GGUFRows, output: Part, offset: int) -> None:
        """Store one matrix of a checkpoint.

        Args:
            layer: whose ``input`` says which columns to keep.
            name: parameter name.
            tensor: the full matrix of ``output.full`` rows.
            output: which rows to keep.
            offset: the local row where they begin.
        """

    def prepare(self, layer: "LinearBase") -> None:  # noqa: B027  (a method may need nothing)
        """Called once when the layer is loaded: put the parameters in the form ``apply`` reads, in their place.

        A repacked copy must replace the parameter it was made from, so that at most one layer exists twice.
        """

    @abstractmethod
    def apply(self, layer: "LinearBase", x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ W.T + bias``: [..., in_features] → [..., out_features], in x's dtype."""

    def apply_gated(
        self, layer: "LinearBase", x: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
    ) -> torch.Tensor:
        """``activation(apply(...))`` for a layer whose outputs are gate | up: [..., in] → [..., out_features / 2]."""
        return activation(self.apply(layer, x, bias))

    def logits(self, layer: "LinearBase", x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T`` in float32: scores must not be rounded to the model's dtype once more than needed."""
        return self.apply(layer, x, None).float()

    @abstractmethod
    def matrix(self, layer: "LinearBase") -> torch.Tensor:
        """The plain matrix [out_features, in_features], whatever form ``prepare`` gave it."""

    @abstractmethod
    def embed(self, layer: "LinearBase", ids_T: torch.Tensor) -> torch.Tensor:
        """Rows ``ids_T`` of the matrix as float32 [T, in_features]: the residual stream begins with them."""


class UnquantizedLinearMethod(LinearMethod):
    """The matrix as it is, in the model's dtype, [out_features, in_features]."""

    def create_weights(self, layer: "LinearBase", options: BuildOptions) -> None:
        layer.declare("weight", (layer.out_features, layer.in_features), options, tuple(layer.outputs))

    def load(self, layer: "LinearBase", name: str, tensor: torch.Tensor | GGUFRows, output: Part, offset: int) -> None:
        weight = layer.parameter(name)
        check_shape((output.full, layer.input.full), tensor)
        if not isinstance(tensor, torch.Tensor):
            tensor = tensor.dequantize(weight.dtype)
        copy_checked(weight[offset : offset + output.size], tensor[output.slice, layer.input.slice])

    def apply(self, layer: "LinearBase", x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)

    def matrix(self, layer: "LinearBase") -> torch.Tensor:
        return layer.weight

    def embed(self, layer: "LinearBase", ids_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids_T, layer.weight).float()


class LinearBase(WeightModule):
    """A matrix of which this rank holds ``input``'s columns and the stacked rows of ``outputs``.

    Args:
        input_part: this rank's share of the input features.
        outputs: its share of each stacked output, by shard name (one entry named None when nothing is stacked).
        bias: the local outputs get a bias vector.
        options: dtype, device, method.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, input_part: Part, outputs: dict[str | None, Part], bias: bool, options: BuildOptions) -> None:
        super().__init__()
        self.input = input_part
        self.outputs = outputs
        self.in_features = input_part.size
        self.out_features = sum(part.size for part in outputs.values())
        self.method = options.linear_method.for_layer()
        self.method.create_weights(self, options)
        if bias:
            self.declare("bias", (self.out_features,), options, tuple(outputs))
        else:
            self.register_parameter("bias", None)

    def load_weight(self, name: str, tensor: torch.Tensor | GGUFRows, shard: str | None = None) -> None:
        if shard is None and len(self.outputs) > 1:
            full = sum(part.full for part in self.outputs.values())
            check_shape((full, *tensor.shape[1:]), tensor)
            pieces = tensor.split([part.full for part in self.outputs.values()])
            for key, piece in zip(self.outputs, pieces, strict=True):
                self.load_weight(name, piece, key)
            return
        output, offset = self.outputs[shard], self._offset(shard)
        if name == "bias" and isinstance(tensor, torch.Tensor):
            bias = self.parameter(name)
            check_shape((output.full,), tensor)
            copy_checked(bias[offset : offset + output.size], tensor[output.slice])
        else:
            self.method.load(self, name, tensor, output, offset)
        self.mark_loaded(name, shard)

    def full_shape(self, name: str) -> tuple[int, ...]:
        rows = sum(part.full for part in self.outputs.values())
        return (rows,) if name == "bias" else (rows, self.input.full)

    def _offset(self, shard: str | None) -> int:
        offset = 0
        for key, part in self.outputs.items():
            if key == shard:
                return offset
            offset += part.size
        raise KeyError(shard)

    def prepare(self) -> None:
        """Bring loaded parameters into the form the method computes with."""
        self.method.prepare(self)

    def matrix(self) -> torch.Tensor:
        """This rank's matrix, [out_features, in_features]."""
        return self.method.matrix(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        return self.method.apply(self, x, self.bias)


class ColumnParallelLinear(LinearBase):
    """Each rank computes an equal share of the outputs from the whole input."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, options: BuildOptions) -> None:
        part = Part.split(out_features, options.tp.rank, options.tp.size, "output features")
        super().__init__(Part.whole(in_features), {None: part}, bias, options)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel matrices over one input, stacked; ``outputs`` maps shard names to output features."""

    def __init__(self, in_features: int, outputs: dict[str, int], *, bias: bool, options: BuildOptions) -> None:
        tp = options.tp
        parts: dict[str | None, Part] = {
            name: Part.split(full, tp.rank, tp.size, "output features") for name, full in outputs.items()
        }
        super().__init__(Part.whole(in_features), parts, bias, options)

    def gated(self, x: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
        """The activated first of two equal outputs times the second: [..., in_features] → [..., out_features / 2]."""
        return self.method.apply_gated(self, x, self.bias, activation)


class QKVParallelLinear(LinearBase):
    """Queries, keys and values of a rank's heads, stacked as q | k | v (shard names "q", "k", "v").

    With more ranks than key heads each key head is held by several ranks, next to the query heads that read it.
    """

    def __init__(
        self, in_features: int, head_size: int, num_heads: int, num_kv_heads: int, *, bias: bool, options: BuildOptions
    ) -> None:
        tp = options.tp
        query_heads = Part.split(num_heads, tp.rank, tp.size, "query heads")
        if tp.size > num_kv_heads and tp.size % num_kv_heads == 0:
            kv_heads = Part(num_kv_heads, tp.rank // (tp.size // num_kv_heads), 1)
        else:
            kv_heads = Part.split(num_kv_heads, tp.rank, tp.size, "key and value heads")
        self.num_heads = query_heads.size
        self.num_kv_heads = kv_heads.size
        self.sizes = [query_heads.size * head_size, kv_heads.size * head_size, kv_heads.size * head_size]
        query, key = (
            Part(p.full * head_size, p.start * head_size, p.size * head_size) for p in (query_heads, kv_heads)
        )
        super().__init__(Part.whole(in_features), {"q": query, "k": key, "v": key}, bias, options)


class RowParallelLinear(LinearBase):
    """Each rank multiplies its share of the inputs; the results are summed over the ranks."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, options: BuildOptions) -> None:
        self.tp = options.tp
        part = Part.split(in_features, options.tp.rank, options.tp.size, "input features")
        super().__init__(part, {None: Part.whole(out_features)}, bias, options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.tp.rank == 0 else None  # added once, not once per rank
        return self.tp.reduce(self.method.apply(self, x, bias))
