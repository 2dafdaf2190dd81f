"""The tokens of a real tokenizer as bytes."""

import dataclasses

import pytest

from tests.entrypoints.http_server import http_config, tokenizer
from vllm_clone.config import VllmConfig
from vllm_clone.core.structured_output.vocabulary import load_vocabulary
from vllm_clone.errors import ConfigError


def config(**model: object) -> VllmConfig:
    made = http_config()
    return dataclasses.replace(made, model_config=dataclasses.replace(made.model_config, **model))


def test_ordinary_tokens_are_their_bytes_and_special_ones_are_no_text():
    words = load_vocabulary(config())
    ids = tokenizer().encode("Hello wörld 12", add_special_tokens=False)
    assert b"".join(words.token_bytes[i] for i in ids).decode() == "Hello wörld 12"
    assert words.encode("Hello") == tokenizer().encode("Hello", add_special_tokens=False)
    assert {words.token_bytes[i] for i in words.special_ids} == {b""}
    assert words.special_names[1] == b"<|im_start|>"
    assert words.stop_ids == (2,)


@pytest.mark.parametrize("size", [49152 + 77, 1000])
def test_there_is_one_entry_per_score_of_the_model(size: int):
    words = load_vocabulary(config(vocab_size=size))
    assert len(words.token_bytes) == size
    assert words.num_words == (size + 31) // 32
    assert words.token_bytes[49152:] == [b""] * max(size - 49152, 0)


def test_a_model_that_cannot_end_a_text_has_no_grammars():
    with pytest.raises(ConfigError, match="no token that ends a text"):
        load_vocabulary(config(vocab_size=1, eos_token_ids=[]))


def test_stop_ids_of_a_request_end_a_text_only_when_they_are_no_text():
    words = load_vocabulary(config())
    letter = words.encode("a")[0]
    assert words.ends([2, 1, letter, 10**9]) == [2, 1]
