"""A memory-mapped reader of GGUF files (format versions 2 and 3, little-endian).

Large string arrays are decoded in one pass, so a tokenizer of 50,000 entries is read in tens of milliseconds.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import enum
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_clone.errors import ConfigError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ARRAY_HEADER = 12
"""Bytes of an array's item type and count."""
_MAX_COUNT = 1 << 26


class GGMLType(enum.IntEnum):
    """Storage formats of tensors."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


BLOCK_SIZES: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4), GGMLType.F16: (1, 2), GGMLType.BF16: (1, 2), GGMLType.F64: (1, 8),
    GGMLType.I8: (1, 1), GGMLType.I16: (1, 2), GGMLType.I32: (1, 4), GGMLType.I64: (1, 8),
    GGMLType.Q4_0: (32, 18), GGMLType.Q4_1: (32, 20), GGMLType.Q5_0: (32, 22), GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34), GGMLType.Q8_1: (32, 40), GGMLType.Q2_K: (256, 84), GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144), GGMLType.Q5_K: (256, 176), GGMLType.Q6_K: (256, 210), GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66), GGMLType.IQ2_XS: (256, 74), GGMLType.IQ3_XXS: (256, 98), GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18), GGMLType.IQ3_S: (256, 110), GGMLType.IQ2_S: (256, 82), GGMLType.IQ4_XS: (256, 136),
    GGMLType.IQ1_M: (256, 56), GGMLType.TQ1_0: (256, 54), GGMLType.TQ2_0: (256, 66), GGMLType.MXFP4: (32, 17),
}  # fmt: skip
"""Type → (elements per block, bytes per block)."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's place in the file; ``shape`` is outermost first, as numpy and torch write it."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file.

    Args:
        path: the file.
        vocabulary: False skips the tokenizer's large arrays, which only tokenizers need.

    Attributes:
        metadata: key → value, in the order of the file.
        tensors: name → place in the file; every place lies inside the file.

    Raises:
        ConfigError: not a GGUF file, an unknown version, or a truncated one; the message names the place.
    """

    def __init__(self, path: str | Path, *, vocabulary: bool = True) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = self.path.stat().st_size
                if size < 24 or file.read(4) != MAGIC:
                    raise ConfigError(f"{path} is not a GGUF file: it does not begin with the bytes {MAGIC.decode()}.")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error.strerror}.") from error
        self._vocabulary = vocabulary
        self._tokens_at = (0, 0)
        self._at = 4
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path} is truncated or damaged near byte {self._at} of {size}.") from error

    def tensor_bytes(self, name: str) -> memoryview:
        """The raw bytes of a tensor, mapped, not copied."""
        tensor = self.tensors[name]
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.nbytes]

    def release(self, name: str) -> None:
        """Take the pages of a tensor out of this process's memory; they are read again when they are needed."""
        tensor, page = self.tensors[name], mmap.PAGESIZE
        first, end = -(-tensor.offset // page) * page, (tensor.offset + tensor.nbytes) // page * page
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def find_token(self, text: str) -> int | None:
        """Id of a vocabulary entry, found without decoding the vocabulary; None when there is none."""
        raw = text.encode()
        at, end = self._tokens_at
        found = self._map.find(struct.pack("<Q", len(raw)) + raw, at, end)
        index = 0
        while at < found:
            at += 8 + struct.unpack_from("<Q", self._map, at)[0]
            index += 1
        return index if at == found else None

    def _read_header(self) -> None:
        (self.version,) = self._take("I")
        if self.version not in (2, 3):
            order = "is big-endian" if self.version >> 24 in (2, 3) else f"has GGUF version {self.version}"
            raise ConfigError(f"{self.path} {order}; versions 2 and 3 in little-endian order can be read.")
        num_tensors, num_pairs = self._take("QQ")
        if max(num_tensors, num_pairs) > _MAX_COUNT:
            raise ConfigError(f"{self.path} is damaged: its header counts {num_tensors} tensors and {num_pairs} keys.")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            (kind,) = self._take("I")
            begin = self._at
            skip = not self._vocabulary and key.startswith("tokenizer.ggml.") and kind == _ARRAY
            value = self._value(kind, skip)
            if key == "tokenizer.ggml.tokens" and kind == _ARRAY:
                self._tokens_at = (begin + _ARRAY_HEADER, self._at)
            if not skip:
                self.metadata[key] = value
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{self.path} is damaged: general.alignment is {alignment!r}.")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, ggml_type, offset in entries:
            if name in self.tensors:
                raise ConfigError(f"{self.path} is damaged: it holds tensor {name} twice.")
            self.tensors[name] = self._placed(name, shape, ggml_type, start + offset)

    def _placed(self, name: str, shape: tuple[int, ...], ggml_type: GGMLType, offset: int) -> GGUFTensor:
        per_block, block_bytes = BLOCK_SIZES[ggml_type]
        if shape and shape[-1] % per_block:
            raise ConfigError(
                f"{self.path} is damaged: rows of {shape[-1]} values in tensor {name} are no multiple of the "
                f"{per_block} values of a {ggml_type.name} block."
            )
        nbytes = math.prod(shape) // per_block * block_bytes
        if offset + nbytes > len(self._map):
            raise ConfigError(
                f"{self.path} is truncated: tensor {name} should end at byte {offset + nbytes}, "
                f"the file has {len(self._map)}."
            )
        return GGUFTensor(name, shape, ggml_type, offset, nbytes)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLType, int]:
        name = self._string()
        (rank,) = self._take("I")
        dims = self._take(f"{rank}Q")
        code, offset = self._take("IQ")
        try:
            return name, tuple(reversed(dims)), GGMLType(code), offset
        except ValueError:
            raise ConfigError(f"{self.path}: tensor {name} has the unknown storage type {code}.") from None

    def _take(self, fmt: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + fmt, self._map, self._at)
        self._at += struct.calcsize("<" + fmt)
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        raw = self._map[self._at : self._at + length]
        if len(raw) < length:
            raise IndexError
        self._at += length
        return raw.decode()

    def _value(self, kind: int, skip: bool) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._take("IQ")
            if count > len(self._map):
                raise IndexError
            return self._array(item, count, skip)
        if kind not in _SCALARS:
            raise ConfigError(f"{self.path} is damaged: unknown metadata type {kind} near byte {self._at}.")
        return self._take(_SCALARS[kind])[0]

    def _array(self, item: int, count: int, skip: bool) -> list[Any]:
        if item == _STRING:
            return self._strings(count, skip)
        if item not in _SCALARS:
            return [self._value(item, skip) for _ in range(count)]
        values = struct.Struct(f"<{count}{_SCALARS[item]}")
        if self._at + values.size > len(self._map):
            raise IndexError
        found = [] if skip else list(values.unpack_from(self._map, self._at))
        self._at += values.size
        return found

    def _strings(self, count: int, skip: bool) -> list[str]:
        data, at, length_of = self._map, self._at, struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            (length,) = length_of(data, at)
            at += 8
            if at + length > len(data):
                raise IndexError
            if not skip:
                out.append(data[at : at + length].decode(errors="replace"))
            at += length
        self._at = at
        return out
