"""Modules whose parameters come from a checkpoint, and the bookkeeping of what has arrived."""

import torch
from torch import nn

from vllm_clone import kernels
from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.gguf_rows import GGUFRows
from vllm_clone.layers.options import BuildOptions

PLAIN_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


def copy_checked(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy with conversion to the target's dtype.

    Raises:
        ModelLoadError: shapes differ, or the source is not plain floating point.
    """
    check_plain(source)
    check_shape(tuple(target.shape), source)
    target.copy_(source)


def check_plain(tensor: torch.Tensor) -> None:
    """Raise ModelLoadError unless ``tensor`` is plain floating point."""
    if tensor.dtype not in PLAIN_DTYPES:
        raise ModelLoadError(f"expected a plain floating-point dtype, found {str(tensor.dtype).removeprefix('torch.')}")


def check_shape(expected: tuple[int, ...], tensor: torch.Tensor | GGUFRows) -> None:
    """Raise ModelLoadError unless ``tensor`` has the expected shape."""
    if tuple(tensor.shape) != expected:
        raise ModelLoadError(f"expected shape {list(expected)}, found {list(tensor.shape)}")


class WeightModule(nn.Module):
    """A module that owns parameters a checkpoint must fill, whole or shard by shard."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: set[tuple[str, str | None]] = set()

    def declare(
        self, name: str, shape: tuple[int, ...], options: BuildOptions, shards: tuple[str | None, ...] = (None,)
    ) -> None:
        """Create an uninitialised parameter that waits for ``shards`` (None is the whole tensor)."""
        if options.device.type == "cpu":
            data = kernels.empty_weight(shape, options.dtype)
        else:
            data = torch.empty(shape, dtype=options.dtype, device=options.device)
        self.register_parameter(name, nn.Parameter(data, requires_grad=False))
        self._pending |= {(name, shard) for shard in shards}

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None = None) -> None:
        """Fill a parameter from a checkpoint's full, unsharded tensor.

        Args:
            name: the parameter's name, which is the last part of the tensor's name.
            tensor: in any plain floating-point dtype; only read.
            shard: which of several stacked matrices the tensor is, None when it is all of them.

        Raises:
            ModelLoadError: no such parameter, wrong shape or dtype. The caller adds file and tensor names.
        """
        copy_checked(self.parameter(name), tensor)
        self.mark_loaded(name, shard)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a checkpoint's tensor that fills the whole parameter, on every rank."""
        return tuple(self.parameter(name).shape)

    def prepare(self) -> None:
        """Called when all has arrived: bring the parameters into the form to compute with."""
        return

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter called ``name``; ModelLoadError when the model has none."""
        parameter = self._parameters.get(name)
        if parameter is None:
            raise ModelLoadError(f"the model has no {name!r} here (check the config's bias and layer settings)")
        return parameter

    def mark_loaded(self, name: str, shard: str | None) -> None:
        """Strike a shard, or with None all shards, off the list of what is missing."""
        for pair in list(self._pending):
            if pair[0] == name and shard in (None, pair[1]):
                self._pending.discard(pair)

    def pending(self) -> list[tuple[str, str | None]]:
        """(parameter, shard) pairs that no checkpoint tensor has filled yet."""
        return sorted(self._pending, key=lambda pair: (pair[0], pair[1] or ""))
