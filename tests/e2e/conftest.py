"""Servers and model files that the end-to-end tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import SERVED_NAME, Server, running, smollm2_gguf


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real model, served once for all tests of a worker."""
    log = tmp_path_factory.mktemp("server") / "smollm2.log"
    args = ("--served-model-name", SERVED_NAME, "--max-model-len", "2048", "--kv-cache-memory-bytes", "256M")
    with running(smollm2_gguf(), log, *args) as server:
        yield server


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with SmolLM2's tokenizer: the cost of everything but the model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("toy-llama")
    gguf = Path(smollm2_gguf())
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def toy(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The toy model behind a real server."""
    log = tmp_path_factory.mktemp("server") / "toy.log"
    with running(str(toy_model), log, "--served-model-name", "toy", "--kv-cache-memory-bytes", "64M") as server:
        yield server
