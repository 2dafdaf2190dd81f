"""An OpenAI-compatible LLM inference server; also usable from Python through LLM and SamplingParams."""

from typing import TYPE_CHECKING, Any

from vllm_clone.version import __version__

if TYPE_CHECKING:
    from vllm_clone.entrypoints.llm import LLM
    from vllm_clone.outputs import RequestOutput
    from vllm_clone.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]

_HOME = {
    "LLM": "vllm_clone.entrypoints.llm",
    "RequestOutput": "vllm_clone.outputs",
    "SamplingParams": "vllm_clone.sampling_params",
    "StructuredOutputsParams": "vllm_clone.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: `vllm --version` must not load an engine."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
