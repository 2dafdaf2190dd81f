"""Checkpoints as streams of named tensors: safetensors and PyTorch files, whole or in shards."""

import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.gguf_rows import GGUFRows
from vllm_clone.platforms import cpu


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint. Nothing is read before ``read`` is called."""

    name: str
    file: str
    """Its file's name, for messages."""
    nbytes: int
    """Bytes on disk."""
    read: Callable[[], torch.Tensor]
    read_rows: Callable[[], GGUFRows] | None = None
    """For a matrix [out, in] of a GGUF file: its rows as they are stored."""


class Checkpoint(Protocol):
    """A set of weight files."""

    @property
    def files(self) -> list[Path]:
        """The files, in reading order."""

    def tensors(self) -> Iterator[CheckpointTensor]:
        """All tensors, file by file. Raises ModelLoadError for a file that cannot be read."""


def find_files(directory: Path, stem: str, suffix: str) -> list[Path]:
    """The weight files ``stem*.suffix`` of a directory; empty when there are none.

    An index file decides which belong to the model; other files (adapters, duplicates in another layout) stay out.

    Raises:
        ModelLoadError: the index is unreadable or names a file that is missing.
    """
    index = directory / f"{stem}.{suffix}.index.json"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{index}: not a shard index with a weight_map ({error})") from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelLoadError(f"{index.name} names {len(names)} files; missing: {', '.join(missing)} in {directory}")
        return [directory / name for name in names]
    single = directory / f"{stem}.{suffix}"
    if single.is_file():
        return [single]
    return sorted(directory.glob(f"{stem}-*-of-*.{suffix}"))


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """safetensors files, mapped into memory and read tensor by tensor, in the order of the file.

    A tensor's pages leave this process when the next one is asked for, so a file is never in its memory as a whole.
    """

    files: list[Path]

    def tensors(self) -> Iterator[CheckpointTensor]:
        for path in self.files:
            try:
                with safe_open(path, framework="pt") as file:
                    yield from self._of_file(path, file)
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path}: {_safetensors_problem(path, error)}") from error

    def _of_file(self, path: Path, file: "safe_open") -> Iterator[CheckpointTensor]:
        sizes, mapped = _safetensors_sizes(path), cpu.MappedFile(path)
        for name in file.offset_keys():
            yield CheckpointTensor(name, path.name, sizes[name], partial(_read_safetensor, file, name))
            mapped.drop_pages()


def _read_safetensor(file: "safe_open", name: str) -> torch.Tensor:
    try:
        return file.get_tensor(name)
    except (SafetensorError, ValueError, KeyError) as error:  # a dtype that torch lacks
        raise ModelLoadError(f"cannot be read ({str(error) or type(error).__name__})") from error


def _safetensors_header(path: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    """Offset of the data and the header of a well-formed file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def _safetensors_sizes(path: Path) -> dict[str, int]:
    _, header = _safetensors_header(path)
    header.pop("__metadata__", None)
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}


def _safetensors_problem(path: Path, error: Exception) -> str:
    """What is wrong with a file that the library refused, in words that say what to do about it."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        start, header = _safetensors_header(path)
        header.pop("__metadata__", None)
        expected = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, OSError, KeyError, OverflowError, MemoryError):
        return f"not a readable safetensors file of {size} bytes ({error})"
    if expected != size:
        word = "truncated" if size < expected else "damaged"
        return f"{word} file: expected {expected} bytes, found {size}; download it again"
    return f"cannot be read ({error})"


@dataclass(frozen=True)
class TorchCheckpoint:
    """PyTorch ``.bin`` or ``.pt`` files. Only tensors are unpickled, never code."""

    files: list[Path]

    def tensors(self) -> Iterator[CheckpointTensor]:
        for path in self.files:
            state, mapped = _load_torch(path), cpu.MappedFile(path)
            for name in list(state):
                tensor = state.pop(name)  # so that a tensor's memory goes with its last user
                if not isinstance(tensor, torch.Tensor):
                    raise ModelLoadError(f"{path}: expected a tensor called {name}, found {type(tensor).__name__}")
                yield CheckpointTensor(name, path.name, tensor.nbytes, tensor.detach)
                mapped.drop_pages()


def _load_torch(path: Path) -> dict[str, torch.Tensor]:
    try:
        # Files of the format before PyTorch 1.6 are no zip archives and cannot be mapped.
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"{path}: truncated, or no PyTorch file of plain tensors ({reason})") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise ModelLoadError(f"{path}: expected a dictionary of tensors, found {type(state).__name__}")
    return state


def total_bytes(files: Iterable[Path]) -> int:
    """Bytes on disk of all files."""
    return sum(path.stat().st_size for path in files)
