"""Tokenizers rebuilt from GGUF metadata agree with those they were converted from."""

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from tests.hub.gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U32, smollm2, write
from tests.tokenizers.conftest import CORPUS, DIGITS, write_spm
from vllm_clone.errors import ConfigError
from vllm_clone.tokenizers import Tokenizer, get_tokenizer
from vllm_clone.tokenizers.base import byte_alphabet


@pytest.fixture(scope="module")
def judge() -> Any:
    """transformers' tokenizer of the same file, with the cutting of digits that its conversion forgets."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2().parent, gguf_file=smollm2().name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.parametrize("text", CORPUS + DIGITS)
def test_smollm2_encodes_as_transformers_does(smol: Tokenizer, judge: Any, text: str) -> None:
    ids = smol.encode(text)
    assert ids == judge.encode(text)
    assert smol.decode(ids, skip_special_tokens=False) == text
    assert smol.decode(ids) == judge.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_smollm2_encodes_any_text_as_transformers_does(smol: Tokenizer, judge: Any, text: str) -> None:
    assert smol.encode(text) == judge.encode(text)  # bytes that its vocabulary lacks included: both drop them


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France", [504, 3575, 282, 4649]),
        ("a a a a a a ", [81, 253, 253, 253, 253, 253, 216]),
        ("Hi<|im_end|>", [26843, 2]),
        ("x", [104]),
        ("", []),
    ],
)
def test_smollm2_gives_the_ids_of_the_model_card(smol: Tokenizer, text: str, ids: list[int]) -> None:
    assert smol.encode(text) == ids
    assert smol.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("text", ["2026", "a 12", "  7"])
def test_smollm2_cuts_numbers_into_digits(smol: Tokenizer, text: str) -> None:
    pieces = smol.convert_ids_to_tokens(smol.encode(text))
    assert [p for p in pieces if any(c.isdigit() for c in p)] == [c for c in text if c.isdigit()]


def test_smollm2_knows_its_special_tokens(smol: Tokenizer, judge: Any) -> None:
    assert (smol.bos_token_id, smol.eos_token_id, smol.vocab_size) == (1, 2, 49152)
    assert smol.special == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert smol.special_ids == smol.added_ids == frozenset(range(17))
    assert smol.chat_template == judge.chat_template
    assert smol.init_settings()["chat_template"] == judge.chat_template


def test_a_large_vocabulary_is_built_in_well_under_a_second() -> None:
    started = time.perf_counter()
    get_tokenizer(str(smollm2()))
    assert time.perf_counter() - started < 2.0  # 0.2 s alone on one core; slack for a busy machine


# ---- byte-level kinds ----


def byte_level(path: Path, pre: str, words: tuple[str, ...] = (), **more: tuple[int, Any]) -> Path:
    """A tokenizer that knows every byte, and ``words`` without merges that lead to them."""
    tokens = [*byte_alphabet(), *words, "<bos>", "<eos>"]
    size = len(tokens)
    metadata: dict[str, tuple[int, Any]] = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, pre),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [1] * (size - 2) + [3, 3])),
        "tokenizer.ggml.merges": (ARRAY, (STRING, [])),
        "tokenizer.ggml.bos_token_id": (U32, size - 2),
        "tokenizer.ggml.eos_token_id": (U32, size - 1),
    }
    return write(path, metadata | {k.replace("__", "."): v for k, v in more.items()})


def words_of(path: Path, pre: str, text: str) -> list[str]:
    """How the tokenizer cuts text before it looks for merges."""
    tokenizer: Any = get_tokenizer(str(byte_level(path, pre)))
    return [text[a:b] for _, (a, b) in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", " 12345", " CamelCase", "!?", "\n ", " x"]),
        ("default", ["It", "'s", " 12345", " CamelCase", "!?", "\n ", " x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " CamelCase", "!?", "\n ", " x"]),
        ("starcoder", ["It", "'s", " ", "1", "2", "3", "4", "5", " CamelCase", "!?", "\n ", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " CamelCase", "!?\n", " ", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " CamelCase", "!?\n", " ", " x"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " Camel", "Case", "!?\n", " ", " x"]),
    ],
)
def test_each_kind_cuts_text_in_its_own_way(tmp_path: Path, pre: str, words: list[str]) -> None:
    assert words_of(tmp_path / "m.gguf", pre, "It's 12345 CamelCase!?\n  x") == words


def test_llama3_takes_whole_words_before_merges_and_begins_with_bos(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(str(byte_level(tmp_path / "m.gguf", "llama-bpe", ("Ġhello",))))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a hello")) == ["<bos>", "a", "Ġhello"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a hello", add_special_tokens=False)) == ["a", "Ġhello"]


def test_gpt2_spells_a_word_that_no_merge_makes(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(str(byte_level(tmp_path / "m.gguf", "gpt-2", ("Ġhi",))))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(" hi")) == ["Ġ", "h", "i"]


@pytest.mark.parametrize(
    ("bos", "eos", "tokens"),
    [(True, True, ["<bos>", "a", "<eos>"]), (False, True, ["a", "<eos>"]), (False, False, ["a"])],
)
def test_the_file_decides_what_frames_a_text(tmp_path: Path, bos: bool, eos: bool, tokens: list[str]) -> None:
    flags = {"tokenizer__ggml__add_bos_token": (BOOL, bos), "tokenizer__ggml__add_eos_token": (BOOL, eos)}
    tokenizer = get_tokenizer(str(byte_level(tmp_path / "m.gguf", "llama-bpe", **flags)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a")) == tokens


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(str(byte_level(tmp_path / "m.gguf", "qwen2")))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_an_ordinary_token_named_as_padding_stays_ordinary(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", "gpt-2", tokenizer__ggml__padding_token_id=(U32, 0))
    tokenizer = get_tokenizer(str(path))
    assert tokenizer.special["pad_token"] == "!"
    assert tokenizer.decode(tokenizer.encode("wow!")) == "wow!"


def test_named_templates_are_kept_by_name(tmp_path: Path) -> None:
    templates = {
        "tokenizer__chat_template": (STRING, "plain"),
        "tokenizer__chat_template__tool_use": (STRING, "tools"),
    }
    tokenizer = get_tokenizer(str(byte_level(tmp_path / "m.gguf", "gpt-2", **templates)))
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}


# ---- SentencePiece ----


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["▁ab", "c"]),
        ("a", ["▁a"]),
        ("c", ["▁", "c"]),
        ("ab ab", ["▁ab", "▁ab"]),
        ("é", ["▁", "é"]),
        ("日", ["▁", "<0xE6>", "<0x97>", "<0xA5>"]),
        ("a<|user|>a", ["▁a", "<|user|>", "▁a"]),
        ("", []),
    ],
)
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(spm: Tokenizer, text: str, pieces: list[str]) -> None:
    ids = spm.encode(text)
    assert spm.convert_ids_to_tokens(ids) == ["<s>", *pieces]
    assert spm.decode(ids) == text.replace("<|user|>a", "<|user|> a")


def test_sentencepiece_control_and_unknown_tokens_are_special(spm: Tokenizer) -> None:
    assert spm.special_ids == {0, 1, 2}
    assert spm.convert_ids_to_tokens(sorted(spm.added_ids - spm.special_ids)) == ["<|user|>", "  "]


def test_sentencepiece_without_space_prefix(tmp_path: Path) -> None:
    path = write_spm(tmp_path / "m.gguf", add_add_space_prefix=False, add_add_bos_token=False)
    tokenizer = get_tokenizer(str(path))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab ab")) == ["ab", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("abcé 日🦄\n▂")))
def test_sentencepiece_gives_back_any_text(spm: Tokenizer, text: str) -> None:
    assume("  " not in text)  # a token of its own, after which this kind of tokenizer puts a space
    assert spm.decode(spm.encode(text)) == text


# ---- refusals ----


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        get_tokenizer(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_an_unknown_way_of_cutting_is_refused_not_guessed(tmp_path: Path) -> None:
    assert "pre-tokenizer 'martian' is not known" in refused(byte_level(tmp_path / "m.gguf", "martian"))


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    assert "GGUF tokenizer 'bert' is not supported" in refused(write_spm(tmp_path / "m.gguf", model="bert"))


def test_a_file_without_tokenizer_says_so(tmp_path: Path) -> None:
    assert "holds no tokenizer" in refused(write(tmp_path / "m.gguf", {"x": (F32, 1.0)}))


def test_merges_of_unknown_tokens_are_damage(tmp_path: Path) -> None:
    merges = {"tokenizer__ggml__merges": (ARRAY, (STRING, ["日 本"]))}
    assert "merges do not fit its vocabulary" in refused(byte_level(tmp_path / "m.gguf", "gpt-2", **merges))


def test_missing_scores_are_damage(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, ["<unk>", "a"])),
    }
    assert "2 tokens, 0 scores" in refused(write(tmp_path / "m.gguf", metadata))
