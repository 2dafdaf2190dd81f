"""GGUF files: tensor names of each architecture, and tensors brought back to what the original checkpoint had.

Matrices come in the bits of the file too, for layers that multiply by them as they are.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_clone.errors import ModelLoadError
from vllm_clone.hub.gguf import GGUFFile, GGUFTensor
from vllm_clone.hub.gguf_config import ROPE_PERMUTED
from vllm_clone.layers.gguf_rows import GGUFRows, dequantize
from vllm_clone.model_loader.checkpoint import CheckpointTensor

FREQ_FACTORS = "rope_freqs.weight"

_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
}
_GEMMA = _DECODER | {
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.*.attn_norm": "transformer.h.*.ln_1",
    "blk.*.ffn_norm": "transformer.h.*.ln_2",
    "blk.*.attn_qkv": "transformer.h.*.attn.c_attn",
    "blk.*.attn_output": "transformer.h.*.attn.c_proj",
    "blk.*.ffn_up": "transformer.h.*.mlp.c_fc",
    "blk.*.ffn_down": "transformer.h.*.mlp.c_proj",
}
NAMES: dict[str, dict[str, str]] = {
    "llama": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt2": _GPT2,
}
"""general.architecture → GGUF module name → module name in a Hugging Face checkpoint, ``*`` for the layer."""

_NORM_SHIFTED = frozenset({"gemma2", "gemma3"})
"""Their converter stores norm weights plus 1."""
_TRANSPOSED = frozenset(f"blk.*.{name}" for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"))
"""GPT-2's matrices, which its own checkpoints keep as [in, out] and GGUF as [out, in]."""


class GGUFCheckpoint:
    """A GGUF file as a stream of tensors under their Hugging Face names.

    Pages of the file are let go once their tensor was read, so that it is not in memory beside what is made of it.

    Args:
        path: the file.
        dtype: the model's, which ``read`` converts all tensors to.

    Raises:
        ModelLoadError: no tensor names are known for the file's architecture.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.files = [path]
        self._file = GGUFFile(path, vocabulary=False)
        self._dtype = dtype
        metadata = self._file.metadata
        self._arch = str(metadata.get("general.architecture"))
        if self._arch not in NAMES:
            raise ModelLoadError(f"{path}: unknown GGUF architecture {self._arch!r}; known: {', '.join(NAMES)}")
        heads: Any = metadata.get(f"{self._arch}.attention.head_count")
        self._heads = {"attn_q": heads, "attn_k": metadata.get(f"{self._arch}.attention.head_count_kv", heads)}

    def config_additions(self) -> dict[str, Any]:
        """Facts for the model's config that the file keeps in tensors: divisors of the rotary frequencies."""
        if FREQ_FACTORS not in self._file.tensors:
            return {}
        tensor = self._file.tensors[FREQ_FACTORS]
        return {"rope_freq_factors": self._dequantize(tensor, torch.float32).tolist()}

    def tensors(self) -> Iterator[CheckpointTensor]:
        for tensor in self._file.tensors.values():
            if tensor.name != FREQ_FACTORS:
                rows = partial(self._rows, tensor) if len(tensor.shape) == 2 else None
                name = self._checkpoint_name(tensor.name)
                yield CheckpointTensor(name, self.files[0].name, tensor.nbytes, partial(self._read, tensor), rows)
                self._file.release(tensor.name)

    def _checkpoint_name(self, name: str) -> str:
        pattern, layer, leaf = _pattern(name)
        target = NAMES[self._arch].get(pattern)
        return name if target is None else f"{target.replace('*', layer)}.{leaf}"

    def _read(self, tensor: GGUFTensor) -> torch.Tensor:
        pattern, _, leaf = _pattern(tensor.name)
        kind = pattern.rpartition(".")[2]
        if self._arch in _NORM_SHIFTED and kind.endswith("norm"):
            return (self._dequantize(tensor, torch.float32) - 1.0).to(self._dtype)
        data = self._dequantize(tensor, self._dtype)
        if self._arch in ROPE_PERMUTED and kind in self._heads:
            return _unpermute(data, int(self._heads[kind]))
        if self._arch == "gpt2" and pattern in _TRANSPOSED and leaf == "weight":
            return data.t()
        return data

    def _rows(self, tensor: GGUFTensor) -> GGUFRows:
        data = np.frombuffer(self._file.tensor_bytes(tensor.name), np.uint8).reshape(tensor.shape[0], -1)
        rows = GGUFRows(data, tensor.ggml_type, tensor.shape[1])
        kind = _pattern(tensor.name)[0].rpartition(".")[2]
        return rows.unpermute(int(self._heads[kind])) if self._arch in ROPE_PERMUTED and kind in self._heads else rows

    def _dequantize(self, tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(self._file.tensor_bytes(tensor.name), tensor.ggml_type, tensor.shape, dtype)


def _pattern(name: str) -> tuple[str, str, str]:
    """``blk.7.attn_q.weight`` → (``blk.*.attn_q``, ``7``, ``weight``)."""
    *path, leaf = name.split(".")
    layer = next((part for part in path if part.isdecimal()), "")
    return ".".join("*" if part.isdecimal() else part for part in path), layer, leaf


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the converter's pairing of rows (i, i + half) of each head as neighbours; for matrices and biases."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
