#!/usr/bin/env python3
"""Random-weight Llama of a given shape, as bf16 safetensors and as GGUF in bf16 and Q4_1, all with the same weights.

    make_model.py OUT --tokenizer DIR --gguf-tokenizer FILE.gguf
                  [--layers 22 --hidden 2048 --intermediate 5632 --heads 32 --kv-heads 4] [--seed 0]

Writes the directory OUT and, beside it, OUT-bf16.gguf and OUT-q4_1.gguf. The default is the shape of 1.07 B parameters
that docs/performance.md speaks of. DIR gives the tokenizer files of the directory, FILE the tokenizer's metadata of
the GGUF files; both must have the same vocabulary. Needs the package gguf. One tensor at a time is in memory.
"""

import argparse
import json
import shutil
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
ROPE_THETA, EPSILON = 10000.0, 1e-5
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
BF16, F32 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32


@dataclass(frozen=True)
class Shape:
    """Of a Llama with tied embeddings."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    context: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Tensor:
    """A tensor under its two names. ``heads``: its rows are per head, in the order that rotary embeddings want."""

    hf: str
    gguf: str
    shape: tuple[int, ...]
    heads: int = 0

    @property
    def is_norm(self) -> bool:
        return len(self.shape) == 1


def tensors(s: Shape) -> Iterator[Tensor]:
    yield Tensor("model.embed_tokens.weight", "token_embd.weight", (s.vocab, s.hidden))
    kv = s.kv_heads * s.head_dim
    for i in range(s.layers):
        a, b = f"model.layers.{i}.", f"blk.{i}."
        yield Tensor(a + "input_layernorm.weight", b + "attn_norm.weight", (s.hidden,))
        yield Tensor(a + "self_attn.q_proj.weight", b + "attn_q.weight", (s.hidden, s.hidden), s.heads)
        yield Tensor(a + "self_attn.k_proj.weight", b + "attn_k.weight", (kv, s.hidden), s.kv_heads)
        yield Tensor(a + "self_attn.v_proj.weight", b + "attn_v.weight", (kv, s.hidden))
        yield Tensor(a + "self_attn.o_proj.weight", b + "attn_output.weight", (s.hidden, s.hidden))
        yield Tensor(a + "post_attention_layernorm.weight", b + "ffn_norm.weight", (s.hidden,))
        yield Tensor(a + "mlp.gate_proj.weight", b + "ffn_gate.weight", (s.intermediate, s.hidden))
        yield Tensor(a + "mlp.up_proj.weight", b + "ffn_up.weight", (s.intermediate, s.hidden))
        yield Tensor(a + "mlp.down_proj.weight", b + "ffn_down.weight", (s.hidden, s.intermediate))
    yield Tensor("model.norm.weight", "output_norm.weight", (s.hidden,))


def bf16_of(tensor: Tensor, seed: int, std: float) -> np.ndarray:
    """The tensor's values as bf16 bits; its name and the seed decide them."""
    if tensor.is_norm:
        return np.full(tensor.shape, 0x3F80, dtype=np.uint16)
    random = np.random.default_rng([seed, zlib.crc32(tensor.hf.encode())])
    bits = (random.standard_normal(tensor.shape, dtype=np.float32) * np.float32(std)).view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # round to nearest even
    return (bits >> np.uint32(16)).astype(np.uint16)


def for_llama_cpp(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k in llama.cpp's order, where the two elements that rotate together are neighbours."""
    if not heads:
        return values
    rows, columns = values.shape
    pairs = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(pairs).reshape(rows, columns)


class SafetensorsFile:
    """A safetensors file of bf16 tensors, written one after the other in the order of its header."""

    def __init__(self, path: Path, order: list[Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for t in order:
            begin, end = end, end + 2 * int(np.prod(t.shape))
            header[t.hf] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, bits: np.ndarray) -> None:
        self._file.write(bits.data)

    def close(self) -> None:
        self._file.close()


def config_json(s: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab,
        "max_position_embeddings": s.context,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def gguf_writer(path: Path, s: Shape, source: gguf.GGUFReader, file_type: gguf.LlamaFileType) -> gguf.GGUFWriter:
    """A writer with the shape's and the tokenizer's metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_file_type(file_type)
    writer.add_block_count(s.layers)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_feed_forward_length(s.intermediate)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_rope_dimension_count(s.head_dim)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(s.vocab)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, element)
    return writer


def type_in_q4_1(tensor: Tensor) -> gguf.GGMLQuantizationType:
    """The embedding, which is the output layer too, stays at eight bits, as llama.cpp keeps that of small models."""
    if tensor.is_norm:
        return F32
    return Q8_0 if tensor.gguf == "token_embd.weight" else Q4_1


def announce(writer: gguf.GGUFWriter, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> None:
    if kind == F32:
        writer.add_tensor_info(tensor.gguf, tensor.shape, np.dtype(np.float32), 4 * tensor.shape[0])
        return
    stored = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
    writer.add_tensor_info(tensor.gguf, stored, np.dtype(np.uint8), int(np.prod(stored)), kind)


def encoded(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """bf16 bits → the bytes that a GGUF file of this type holds."""
    if kind == BF16:
        return values.view(np.uint8)
    floats = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return floats if kind == F32 else gguf.quants.quantize(floats, kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gguf-tokenizer", type=Path, required=True, metavar="FILE")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--std", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    source = gguf.GGUFReader(args.gguf_tokenizer)
    vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    shape = Shape(args.layers, args.hidden, args.intermediate, args.heads, args.kv_heads, vocab, args.context)
    order = list(tensors(shape))
    args.out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (args.tokenizer / name).exists():
            shutil.copyfile(args.tokenizer / name, args.out / name)
    (args.out / "config.json").write_text(json.dumps(config_json(shape), indent=2) + "\n")
    (args.out / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}) + "\n")
    kinds = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1}
    writers = {
        name: gguf_writer(args.out.with_name(f"{args.out.name}-{name}.gguf"), shape, source, kind)
        for name, kind in kinds.items()
    }
    for tensor in order:
        announce(writers["bf16"], tensor, F32 if tensor.is_norm else BF16)
        announce(writers["q4_1"], tensor, type_in_q4_1(tensor))
    for writer in writers.values():
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    weights = SafetensorsFile(args.out / "model.safetensors", order)
    for tensor in order:
        bits = bf16_of(tensor, args.seed, args.std)
        weights.write(bits)
        bits = for_llama_cpp(bits, tensor.heads)
        writers["bf16"].write_tensor_data(encoded(bits, F32 if tensor.is_norm else BF16))
        writers["q4_1"].write_tensor_data(encoded(bits, type_in_q4_1(tensor)))
    weights.close()
    for writer in writers.values():
        writer.close()
    count = sum(int(np.prod(t.shape)) for t in order)
    print(f"{args.out}: {count / 1e9:.3f} B parameters, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
