"""Write a transformers model as a GGUF file, the way llama.cpp's converter lays it out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

DECODER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = DECODER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
NAMES = {"gpt2": GPT2_NAMES, "gemma2": GEMMA_NAMES, "gemma3": GEMMA_NAMES}


SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where in a block of a K type its float16 scales stand. The gguf package reads these types and cannot write them."""


def random_matrix(kind: GGMLQuantizationType, rows: int, width: int, spread: float = 1.0) -> np.ndarray:
    """The stored form of a random matrix whose numbers are about ``spread`` in size."""
    rng = np.random.default_rng(rows + kind)
    if kind.name not in SCALES:
        return gguf.quants.quantize(rng.standard_normal((rows, width), np.float32) * np.float32(spread), kind)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows * width // per_block, block_bytes), dtype=np.uint8)
    factor = 1.0
    for _ in range(2):  # with scales of about 1 to see the spread, then with those that give the one wanted
        for at in SCALES[kind.name]:
            scales = rng.uniform(0.5, 1.5, len(raw)) * factor
            raw[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
        factor = spread / float(gguf.quants.dequantize(raw.reshape(rows, -1), kind).std())
    return raw.reshape(rows, -1)


def gguf_name(arch: str, name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` → ``blk.3.ffn_up.weight``."""
    names = NAMES.get(arch, DECODER_NAMES)
    path, _, leaf = name.rpartition(".")
    if path in names:
        return f"{names[path]}.{leaf}"
    _, _, layer, rest = path.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{leaf}"


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The converter's order of the rows of q and k: dimensions i and i + half become neighbours."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def converted(arch: str, name: str, value: np.ndarray, config: Any) -> np.ndarray:
    """The tensor as the converter stores it."""
    if arch == "llama" and ".q_proj." in name:
        return permute(value, config.num_attention_heads)
    if arch == "llama" and ".k_proj." in name:
        return permute(value, config.num_key_value_heads)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return value + 1
    if arch == "gpt2" and value.ndim == 2 and ".h." in name:
        return np.ascontiguousarray(value.T)
    return value


def restored(arch: str, name: str, value: np.ndarray, config: Any) -> np.ndarray:
    """The matrix that ``converted`` makes ``value`` of."""
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if arch == "llama" and f".{part}." in name:
            rows = value.reshape(getattr(config, heads), -1, 2, value.shape[1])
            return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(value.shape))
    return converted(arch, name, value, config)


def stored_matrix(value: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The stored form of ``value``, or for a K type of a random matrix of its size and spread."""
    if kind.name in SCALES:
        return random_matrix(kind, *value.shape, float(value.std()))
    return gguf.quants.quantize(value, kind)


@torch.no_grad()
def write_gguf(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    kinds: dict[str, GGMLQuantizationType] | None = None,
    keep_output: bool = False,
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    """Write ``model`` to ``path``; matrices are stored as ``kind``, vectors as F32.

    A matrix that is not stored as F32 is replaced in ``model`` by the numbers that its stored form stands for; one of
    a K type, which the gguf package cannot write, by random ones.

    Args:
        path: the file to write.
        model: where the weights come from.
        arch: GGUF's name of the architecture.
        kind: storage type of matrices.
        kinds: other types for matrices whose GGUF name contains the key.
        keep_output: store the logits head although it is tied.
        extra: more tensors, by GGUF name, stored as F32.
    """
    writer = GGUFWriter(str(path), arch)
    _write_metadata(writer, arch, model.config)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings and not keep_output:
            continue
        stored_name = gguf_name(arch, name)
        value = converted(arch, name, parameter.numpy(), model.config)
        own = next((other for part, other in (kinds or {}).items() if part in stored_name), kind)
        if value.ndim == 2 and own != GGMLQuantizationType.F32:
            stored = stored_matrix(value, own)
            writer.add_tensor(stored_name, stored, raw_dtype=own)
            numbers = gguf.quants.dequantize(stored, own).reshape(value.shape)
            parameter.copy_(torch.from_numpy(restored(arch, name, numbers, model.config)))
        else:
            writer.add_tensor(stored_name, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: GGUFWriter, arch: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.hidden_size // config.num_attention_heads if arch == "qwen2" else config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
