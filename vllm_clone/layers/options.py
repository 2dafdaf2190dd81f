"""What every layer is told when it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_clone.layers.linear import LinearMethod

Collective = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among those that share each matrix. Size 1 needs no collectives."""

    rank: int = 0
    size: int = 1
    all_reduce: Collective | None = None
    """Sum of one tensor over all ranks."""
    all_gather: Collective | None = None
    """Concatenation of the ranks' tensors along the last axis, in rank order."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not below the tensor parallel size {self.size}")
        if self.size > 1 and (self.all_reduce is None or self.all_gather is None):
            raise ValueError("more than one rank needs all_reduce and all_gather")

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` over the ranks."""
        return x if self.all_reduce is None else self.all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' ``x`` side by side along the last axis."""
        return x if self.all_gather is None else self.all_gather(x)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Dtype and device of parameters, the method of linear layers, and the limits that size tables."""

    dtype: torch.dtype
    device: torch.device
    linear_method: LinearMethod
    max_positions: int
    """Positions run from 0 to this minus 1 (the longest sequence served)."""
    tp: TensorParallel = field(default_factory=TensorParallel)
