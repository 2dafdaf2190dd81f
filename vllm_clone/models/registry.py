"""Architecture names (config.json's ``architectures``) and the classes that serve them. Imports torch only on use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vllm_clone.config.named_code import import_named
from vllm_clone.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def get_model_class(architecture: str, overrides: Mapping[str, str] | None = None) -> type[CausalLM]:
    """The class that serves ``architecture``: one of ours, or ``package.module:Class`` that ``overrides`` names.

    Raises:
        ModelLoadError: unknown architecture. ConfigError: the named class cannot be imported.
    """
    if overrides and architecture in overrides:
        named: type[CausalLM] = import_named("--model-class-overrides", overrides[architecture])
        return named
    check_architecture(architecture)
    module = importlib.import_module(f"vllm_clone.models.{MODELS[architecture]}")
    return getattr(module, architecture)
