"""Tokenizers that several files use: the real one, and a toy with byte fallback as SentencePiece makes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter

from tests.hub.gguf_bytes import smollm2
from vllm_clone.tokenizers import Tokenizer, get_tokenizer

CORPUS = [
    "", " ", "  ", "\n", "\r\n\r\n", "\t\tx", "Hello world", " Hello  world ", "It's we'll they'RE I'd",
    "naïve café déjà", "e\u0301 vs \u00e9", "日本語のテキスト", "中文，标点。", "한국어 조선글", "Привет, мир!",
    "مرحبا بالعالم", "שלום", "नमस्ते", "🦄🧬👍🏽", "👨\u200d👩\u200d👧", "a\u200bb\ufeffc\u00a0d",
    "def f(x):\n    return {'a': [x, -1]}  # ok\n", "<div class=\"a\">&nbsp;</div>", "http://x.y/z?q=a&b=c#d",
    "\\frac{a}{b} $x^y$", "------====****", "ALLCAPS camelCase snake_case", "x" * 300, "Hi<|im_end|>there",
    "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|", "<repo_name><empty_output>", "\x00\x01\x7f",
    "\U0010ffff \ue000", "“quotes” — dashes… ½ ²", "a\u0300\u0301\u0302",
]  # fmt: skip
DIGITS = [
    "0",
    "12345",
    "a1b22c333",
    " 1  22   333",
    "3.14159e-10",
    "1,000,000",
    "v2.0.1",
    "２３ ٣٤ ½ ²",
    "in 1999, 20% of 50",
    "  5",
]


@pytest.fixture(scope="session")
def smol() -> Tokenizer:
    return get_tokenizer(str(smollm2()))


SPM_PIECES = (
    ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    + ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "é", "<|user|>", "  "]
)  # fmt: skip
SPM_TYPES = [2, 3, 3] + [6] * 256 + [1] * 9 + [4, 4]


def write_spm(path: Path, **settings: Any) -> Path:
    """A GGUF file with a SentencePiece tokenizer: letters a, b, c, é and bytes for the rest."""
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(settings.pop("model", "llama"))
    writer.add_token_list([p.encode() for p in SPM_PIECES])
    writer.add_token_scores([-float(i) for i in range(len(SPM_PIECES))])
    writer.add_token_types(SPM_TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in settings.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return get_tokenizer(str(write_spm(tmp_path_factory.mktemp("spm") / "spm.gguf")))


def write_directory(path: Path, config: dict[str, Any], **files: str) -> Path:
    """A tiny word tokenizer in a directory; ``config`` is its tokenizer_config.json, ``files`` are more by stem."""
    vocab = {w: i for i, w in enumerate(["[UNK]", "<s>", "</s>", "hello", "world", "<tool>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path
