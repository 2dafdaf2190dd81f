"""A fake server, a small tokenizer, and a way to run the command against both."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.benchmarks.fake_server import FakeServer, running
from vllm_clone.entrypoints.cli.main import main

TEMPLATE = "{% for m in messages %}<s> {{ m['role'] }} : {{ m['content'] }} {% endfor %}assistant :"


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE with a few merges, so that text and ids do not correspond one to one."""
    path = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ġ", "a"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("in", "g"), ("o", "n"), ("e", "r")]
    vocab = {token: i for i, token in enumerate(["<s>", *alphabet, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def server(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with running() as fake:
        fake.root = str(tokenizer_dir)
        yield fake


@pytest.fixture
def bench(server: FakeServer, capsys: pytest.CaptureFixture[str]):
    """Run `vllm bench serve` against the fake server: (stdout, stderr, exit code)."""

    def run(*argv: str) -> tuple[str, str, int]:
        code = main(["bench", "serve", "--port", str(server.server_port), "--disable-tqdm", *argv])
        out, err = capsys.readouterr()
        return out, err, code

    return run
