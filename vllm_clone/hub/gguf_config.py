"""GGUF metadata → the config.json and generation_config.json that the same model would have."""

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
"""general.architecture → (model_type, architecture). Mistral's files say llama."""

ROPE_PERMUTED = frozenset({"llama"})
"""Architectures whose converter reorders the rows of q and k for interleaved rotary; the loader undoes it."""

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>")
"""Tokens that end an answer wherever they exist; a file names only one end-of-sequence token."""

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key under general.sampling → generation config key."""

_SCORES_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Layers of each family's 27B model, the only one whose scores are scaled by hidden size per head, not head size."""


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """A generation_config.json dictionary: every token that ends an answer, and the sampling that the file advises."""
    meta = file.metadata
    ids = [meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids += [file.find_token(text) for text in END_OF_TURN]
    eos = list(dict.fromkeys(i for i in ids if isinstance(i, int)))
    given = {ours: meta.get(f"general.sampling.{theirs}") for theirs, ours in SAMPLING.items()}
    config = {key: value for key, value in given.items() if value is not None}
    return config | ({"eos_token_id": eos} if eos else {})


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """A config.json dictionary.

    Raises:
        ConfigError: an architecture we do not know, one part of a split file, or a missing key.
    """
    arch = str(file.metadata.get("general.architecture", ""))
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{file.path}: GGUF architecture {arch!r} is not supported; known are {known}.")
    parts = file.metadata.get("split.count", 1)
    if parts > 1:
        raise ConfigError(f"{file.path} is one of {parts} parts; join them first with llama-gguf-split --merge.")

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ConfigError(f"{file.path}: the metadata key {arch}.{key} is missing.")
        if isinstance(value, list):
            raise ConfigError(f"{file.path}: {arch}.{key} differs by layer, which is not supported.")
        return value

    if get("expert_count"):
        raise ConfigError(f"{file.path}: mixture-of-experts models of the architecture {arch} are not supported.")
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
    hidden, heads, layers = need("embedding_length"), need("attention.head_count"), need("block_count")
    head_dim = get("attention.key_length") or get("rope.dimension_count") or hidden // heads
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if get("attention.head_count_kv") is None else need("attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "attention_bias": f"blk.0.attn_{'q' if arch != 'qwen2' else 'output'}.bias" in file.tensors,
        "rope_parameters": _rope(get),
    }
    if not arch.startswith("gemma"):
        config["hidden_act"] = "silu"
    else:
        config["hidden_activation"] = "gelu_pytorch_tanh"
        config["sliding_window"] = get("attention.sliding_window")
        config["query_pre_attn_scalar"] = hidden // heads if layers == _SCORES_BY_WIDTH[arch] else head_dim
    if arch == "gemma2":
        config["attn_logit_softcapping"] = get("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = get("final_logit_softcapping", 30.0)
        config["layer_types"] = _alternate(layers, 2)
    if arch == "gemma3":
        config["layer_types"] = _alternate(layers, 6)
        full = config["rope_parameters"] | {"rope_theta": get("rope.freq_base", 1_000_000.0)}
        local = {"rope_theta": get("rope.freq_base_swa", 10000.0), "rope_type": "default"}
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return config


def _rope(get: Callable[..., Any]) -> dict[str, Any]:
    """Llama 3's scaling is not here: its file keeps a tensor of divisors, which the loader reads."""
    rope: dict[str, Any] = {"rope_theta": get("rope.freq_base", 10000.0), "rope_type": "default"}
    legacy = get("rope.scale_linear")
    scaling = get("rope.scaling.type", "linear" if legacy else "none")
    if scaling in ("linear", "yarn"):
        rope |= {"rope_type": scaling, "factor": get("rope.scaling.factor", legacy or 1.0)}
    if scaling == "yarn" and get("rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    return rope


def _alternate(num_layers: int, period: int) -> list[str]:
    """Every ``period``-th layer sees everything, the others a window."""
    return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(num_layers)]
