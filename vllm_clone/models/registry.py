"""Architecture names (config.json's ``architectures``) and the classes that serve them. Imports torch only on use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vllm_clone.errors import ModelLoadError

if TYPE_CHECKING:
    from vllm_clone.models.base import CausalLM

MODELS: dict[str, str] = {
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architecture → module of this package that defines a class of that name."""

REFUSED: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "its image part is not supported; use a text checkpoint (Gemma3ForCausalLM)",
}


def check_architecture(architecture: str) -> None:
    """Raise ModelLoadError, listing the known ones, unless ``architecture`` can be served."""
    if architecture in REFUSED:
        raise ModelLoadError(f"architecture {architecture!r} cannot be served: {REFUSED[architecture]}")
    if architecture not in MODELS:
        raise ModelLoadError(f"unknown architecture {architecture!r}; known architectures: {', '.join(MODELS)}")


def get_model_class(architecture: str) -> type[CausalLM]:
    """The class that serves ``architecture``. Raises ModelLoadError for unknown names."""
    check_architecture(architecture)
    module = importlib.import_module(f"vllm_clone.models.{MODELS[architecture]}")
    return getattr(module, architecture)
