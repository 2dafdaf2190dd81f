"""--dry-run: what would run, and where each value comes from."""

import json

import pytest

from vllm_clone.entrypoints.cli.dry_run import kv_bytes_per_token
from vllm_clone.entrypoints.cli.main import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip


@pytest.fixture
def dry_run(tmp_path, capsys):
    """The page as a dict from setting to the rest of its line, and its last lines."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))

    def run(*argv: str) -> tuple[dict[str, str], str]:
        assert main(["serve", str(tmp_path), "--dry-run", *argv]) == 0
        page, memory = capsys.readouterr().out.split("\n\n")
        return dict(line.split(None, 1) for line in page.splitlines()), memory

    return run


def test_every_value_says_where_it_comes_from(dry_run, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 4\nmax-logprobs: 5\n")
    page, _ = dry_run("--config", str(file), "--max-logprobs", "7", "-cc.cudagraph_mode=none")
    assert page["scheduler_config.max_num_seqs"] == f"4  (--config {file})"
    assert page["model_config.max_logprobs"] == "7  (command line)"
    assert page["compilation_config.cudagraph_mode"] == '"NONE"  (command line)'
    assert page["model_config.seed"] == "0  (default)"
    assert page["frontend.port"] == "8000  (default)"
    assert page["model_config.max_model_len"] == "4096  (derived: the longest sequence config.json states)"
    assert page["model_config.dtype"].startswith('"float16"  (derived: the checkpoint')
    assert page["optimization_level"] == '"O2"  (default)'


def test_secrets_stay_secret(dry_run):
    page, _ = dry_run("--api-key", "hush")
    assert page["frontend.api_key"] == "***  (command line)"


def test_memory_is_planned(dry_run):
    _, memory = dry_run("--max-num-seqs", "2", "--kv-cache-memory-bytes", "64M")
    assert memory.startswith("memory: 3.0 MiB of weight files, ")
    assert "KV cache: 256 bytes a token, 1.0 MiB for one request of 4096 tokens, 2.0 MiB for all 2" in memory
    assert "--kv-cache-memory-bytes takes 64.0 MiB" in memory


def test_a_model_that_does_not_state_its_heads_has_no_plan():
    assert kv_bytes_per_token({}, "bfloat16") == 0
    assert kv_bytes_per_token(CONFIG, "float32") == 2 * 2 * 2 * 16 * 4
