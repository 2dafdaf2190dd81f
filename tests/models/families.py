"""Tiny random checkpoints, made with transformers: one or more for each family, each with what sets it apart."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Variant:
    """A config that transformers understands, and how long a prompt must be to show what is special about it."""

    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    prompt_length: int = 43

    @property
    def config(self) -> dict[str, Any]:
        return {**({} if self.model_type == "gpt2" else SIZES), **self.overrides}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


GPT2_SIZES = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
              "eos_token_id": 2}  # fmt: skip

VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama"),
    "llama-tied": Variant("llama", {"tie_word_embeddings": True}),
    "llama-biases": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": Variant("llama", {"num_key_value_heads": 1}),
    "llama-no-sharing-of-heads": Variant("llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": Variant("llama", {"head_dim": 32}),
    "llama-rope-linear": Variant("llama", rope("linear", factor=4.0)),
    # Dynamic scaling grows with the sequence in transformers and is set for the longest in a server: equal at the end.
    "llama-rope-dynamic": Variant("llama", {**rope("dynamic", factor=2.0), "max_position_embeddings": 32}, 64),
    "llama-rope-llama3": Variant(
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-rope-yarn": Variant("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-rope-yarn-mscale": Variant(
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.1, beta_fast=8.0,
             truncate=False),
    ),
    "mistral": Variant("mistral", {"sliding_window": None}),
    "mistral-window": Variant("mistral", {"sliding_window": 11}),
    "qwen2": Variant("qwen2"),
    "qwen2-window": Variant("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": Variant("qwen3", {"tie_word_embeddings": True}),
    "qwen3-window": Variant(
        "qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    ),
    "gemma2": Variant("gemma2", {"sliding_window": 10, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0,
                                 "final_logit_softcapping": 2.0}),
    "gemma3": Variant(
        "gemma3_text",
        {
            "sliding_window": 10,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gpt2": Variant("gpt2", GPT2_SIZES),
    "gpt2-scaled-by-layer": Variant(
        "gpt2", {**GPT2_SIZES, "scale_attn_by_inverse_layer_idx": True, "n_inner": 100, "activation_function": "gelu"}
    ),
}  # fmt: skip


def build(variant: Variant) -> PreTrainedModel:
    """A random float32 model on which every weight has an effect that is easy to see in the logits."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(variant.model_type, **variant.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def save(model: PreTrainedModel, directory: Path, **options: Any) -> dict[str, Any]:
    """Write a checkpoint and return its config.json."""
    model.save_pretrained(directory, **options)
    return json.loads((directory / "config.json").read_text())


@torch.no_grad()
def expected_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """transformers' logits after every token, [T, V]."""
    return model(torch.tensor([tokens])).logits[0].float()


def prompt(variant: Variant, seed: int = 1) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 131, (variant.prompt_length,), generator=generator).tolist()
