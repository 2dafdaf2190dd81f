"""GGUF metadata → the config.json that the same model would have."""

from collections.abc import Callable
from typing import Any

from vllm_clone.errors import ConfigError
from vllm_clone.hub.gguf import GGUFFile

ARCHITECTURES: dict[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
}
"""general.architecture → (model_type, architecture)."""

ROPE_PERMUTED = frozenset({"llama"})
"""Architectures whose converter reorders the rows of q and k for interleaved rotary; the loader undoes it."""


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """A config.json dictionary.

    Raises:
        ConfigError: an architecture we do not know, or a missing key.
    """
    arch = str(file.metadata.get("general.architecture", ""))
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{file.path}: GGUF architecture {arch!r} is not supported; known are {known}.")

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ConfigError(f"{file.path}: the metadata key {arch}.{key} is missing.")
        return value

    model_type, architecture = ARCHITECTURES[arch]
    embedding = file.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": embedding.shape[0] if embedding else need("vocab_size"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return config | (_gpt2(need) if arch == "gpt2" else _decoder(arch, get, need, file))


def _gpt2(need: Callable[[str], Any]) -> dict[str, Any]:
    return {
        "n_embd": need("embedding_length"),
        "n_layer": need("block_count"),
        "n_head": need("attention.head_count"),
        "n_positions": need("context_length"),
        "n_inner": need("feed_forward_length"),
        "layer_norm_epsilon": need("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _decoder(arch: str, get: Callable[..., Any], need: Callable[[str], Any], file: GGUFFile) -> dict[str, Any]:
    hidden, heads = need("embedding_length"), need("attention.head_count")
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length") or get("rope.dimension_count") or hidden // heads,
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "hidden_act": "gelu_pytorch_tanh" if arch.startswith("gemma") else "silu",
        "attention_bias": f"blk.0.attn_{'q' if arch != 'qwen2' else 'output'}.bias" in file.tensors,
    }
    rope: dict[str, Any] = {"rope_theta": get("rope.freq_base", 10000.0), "rope_type": "default"}
    scaling = get("rope.scaling.type")
    if scaling in ("linear", "yarn"):
        rope |= {"rope_type": scaling, "factor": get("rope.scaling.factor", 1.0)}
        if scaling == "yarn":
            rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    config["rope_parameters"] = rope
    if arch.startswith("gemma"):
        window = get("attention.sliding_window")
        config["sliding_window"] = window
        config["query_pre_attn_scalar"] = config["head_dim"]
    if arch == "gemma2":
        config["attn_logit_softcapping"] = get("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = get("final_logit_softcapping", 30.0)
        config["layer_types"] = _alternate(config["num_hidden_layers"], 2)
    if arch == "gemma3":
        layers = config["num_hidden_layers"]
        config["layer_types"] = _alternate(layers, 6)
        full = rope | {"rope_theta": get("rope.freq_base", 1_000_000.0)}
        local = {"rope_theta": get("rope.freq_base_swa", 10000.0), "rope_type": "default"}
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return config


def _alternate(num_layers: int, period: int) -> list[str]:
    """Every ``period``-th layer sees everything, the others a window."""
    return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(num_layers)]
