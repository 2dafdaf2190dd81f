import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_clone.config import VllmConfig
from vllm_clone.engine.arg_utils import EngineArgs

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}

ModelMaker = Callable[..., Path]
Resolver = Callable[..., VllmConfig]


@pytest.fixture
def make_model(tmp_path: Path) -> ModelMaker:
    """A model directory without weights: a small Llama's config.json with changes; None leaves a key out."""

    def make(generation: dict[str, Any] | None = None, **changes: Any) -> Path:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        config = {k: v for k, v in (LLAMA | changes).items() if v is not None}
        (directory / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        return directory

    return make


@pytest.fixture
def resolve(make_model: ModelMaker) -> Resolver:
    """Resolve engine arguments for the small Llama; ``config`` changes its config.json."""

    def run(
        *, config: dict[str, Any] | None = None, generation: Any = None, usage: Any = "server", **values: Any
    ) -> VllmConfig:
        model = make_model(generation, **(config or {}))
        return EngineArgs(model=str(model), device="cpu", **values).create_engine_config(usage)

    return run
