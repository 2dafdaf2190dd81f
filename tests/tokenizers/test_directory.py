"""Tokenizers of Hugging Face directories: what each file adds, and the way through transformers."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.hub.gguf_bytes import smollm2
from tests.tokenizers.conftest import CORPUS, DIGITS, write_directory
from vllm_clone.errors import ConfigError, RequestError
from vllm_clone.tokenizers import Tokenizer, get_tokenizer

CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "tokenizer_class": "T"}


def load(path: Path, config: dict[str, Any], **files: str) -> Tokenizer:
    return get_tokenizer(str(write_directory(path / "model", config, **files)))


def test_special_tokens_come_from_the_config_as_text_or_object(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, CONFIG)
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_the_special_tokens_map_fills_what_the_config_leaves_out(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {"bos_token": "<s>"}, special_tokens_map__json='{"eos_token": "</s>", "bos_token": "x"}')
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}


def test_null_special_tokens_are_none(tmp_path: Path) -> None:
    assert load(tmp_path, {"bos_token": None, "eos_token": "</s>"}).bos_token_id is None


@pytest.mark.parametrize(
    ("flags", "ids"),
    [({}, [3]), ({"add_bos_token": True}, [1, 3]), ({"add_bos_token": True, "add_eos_token": True}, [1, 3, 2])],
)
def test_the_config_decides_what_frames_a_text(tmp_path: Path, flags: dict[str, bool], ids: list[int]) -> None:
    tokenizer = load(tmp_path, CONFIG | flags)
    assert tokenizer.encode("hello") == ids
    assert tokenizer.encode("hello", add_special_tokens=False) == [3]


def test_a_special_token_that_is_mere_vocabulary_becomes_special(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, CONFIG | {"pad_token": "<tool>"})
    assert 5 in tokenizer.special_ids
    assert tokenizer.encode("hello<tool>world") == [3, 5, 4]
    assert load(tmp_path / "..", CONFIG | {"extra_special_tokens": ["<tool>"]}).special_ids == {1, 2, 5}


def test_added_tokens_of_the_config_are_known(tmp_path: Path) -> None:
    entry = {"content": "<extra>", "special": False, "normalized": False, "lstrip": False, "rstrip": False}
    tokenizer = load(tmp_path, CONFIG | {"added_tokens_decoder": {"6": entry}})
    assert tokenizer.encode("hello<extra>") == [3, 6]
    assert tokenizer.vocab_size == 7
    assert 6 in tokenizer.added_ids - tokenizer.special_ids


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path, smol: Tokenizer) -> None:
    import tokenizers

    path = write_directory(tmp_path / "m", CONFIG)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.enable_truncation(1)
    backend.enable_padding(length=8)
    backend.save(str(path / "tokenizer.json"))
    assert get_tokenizer(str(path)).encode("hello world") == [3, 4]


# ---- chat templates ----


def test_the_template_of_the_config(tmp_path: Path) -> None:
    assert load(tmp_path, {"chat_template": "T"}).chat_template == "T"


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    files = {"chat_template__jinja": "J", "chat_template__json": '{"chat_template": "S"}'}
    tokenizer = load(tmp_path, {"chat_template": "T"}, **files)
    assert tokenizer.chat_template == "J"
    assert tokenizer.init_settings()["chat_template"] == "J"


def test_the_json_template_file_wins_over_the_config(tmp_path: Path) -> None:
    assert load(tmp_path, {"chat_template": "T"}, chat_template__json='{"chat_template": "S"}').chat_template == "S"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    assert load(tmp_path, {"chat_template": named}).chat_template == {"default": "D", "tool_use": "U"}
    path = write_directory(tmp_path / "files", {}, chat_template__jinja="J")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert get_tokenizer(str(path)).chat_template == {"default": "J", "rag": "R"}


def test_no_template_is_none(tmp_path: Path) -> None:
    assert load(tmp_path, {}).chat_template is None


# ---- refusals ----


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", {})
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a readable tokenizer"):
        get_tokenizer(str(path))


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", {})
    (path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read as JSON"):
        get_tokenizer(str(path))


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff ok"])
def test_half_a_surrogate_pair_is_the_requests_fault(smol: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        smol.encode(text)


# ---- transformers ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer as transformers saves it."""
    path = tmp_path_factory.mktemp("saved")
    AutoTokenizer.from_pretrained(smollm2().parent, gguf_file=smollm2().name).save_pretrained(path)
    return path


def test_a_saved_tokenizer_encodes_as_transformers_does(saved: Path) -> None:
    ours, theirs = get_tokenizer(str(saved)), AutoTokenizer.from_pretrained(saved)
    for text in CORPUS + DIGITS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.special_ids == frozenset(theirs.all_special_ids) | frozenset(range(17))
    assert ours.chat_template == theirs.chat_template
    assert ours.vocab_size == len(theirs)


def test_the_slow_way_gives_the_same(saved: Path) -> None:
    fast, slow = get_tokenizer(str(saved)), get_tokenizer(str(saved), "slow")
    assert type(fast) is not type(slow)
    for text in CORPUS + DIGITS:
        ids = fast.encode(text)
        assert slow.encode(text) == ids
        for skip in (True, False):
            assert slow.decode(ids, skip) == fast.decode(ids, skip)
            mine, theirs = slow.new_decode_stream([504], skip), fast.new_decode_stream([504], skip)
            assert "".join(mine.step(i) or "" for i in ids) == "".join(theirs.step(i) or "" for i in ids)
        assert slow.convert_ids_to_tokens(ids) == fast.convert_ids_to_tokens(ids)
        assert [slow.token_bytes(i) for i in ids] == [fast.token_bytes(i) for i in ids]
    assert (slow.vocab_size, slow.eos_token_id, slow.special) == (fast.vocab_size, fast.eos_token_id, fast.special)
    assert slow.max_chars_per_token == fast.max_chars_per_token
    assert slow.new_decode_stream([]).step(10**9) is None
    with pytest.raises(RequestError, match="not valid Unicode"):
        slow.encode("\ud800")


def test_a_directory_without_any_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No tokenizer can be built from") as caught:
        get_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


# ---- as a part of the server ----


def test_threads_may_share_a_tokenizer(smol: Tokenizer) -> None:
    expected = [smol.encode(text) for text in CORPUS]
    results: list[list[list[int]]] = []

    def work() -> None:
        results.append([smol.encode(text) for text in CORPUS for _ in range(5)][::5])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_the_fast_way_imports_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "huggingface_hub", "numpy")
    code = f"""
import sys
from vllm_clone.tokenizers import get_tokenizer
assert "tokenizers" not in sys.modules
get_tokenizer({str(smollm2())!r}).encode("a")
print([m for m in {heavy} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
