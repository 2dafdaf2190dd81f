"""Ids to text one at a time: nothing shown twice, nothing shown too early, nothing lost that is whole."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizers.conftest import CORPUS, DIGITS
from vllm_clone.tokenizers import Tokenizer


def stream(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], **flags: bool) -> list[str | None]:
    decoder = tokenizer.new_decode_stream(prompt, **flags)
    return [decoder.step(i) for i in ids]


def joined(pieces: list[str | None]) -> str:
    return "".join(p or "" for p in pieces)


@pytest.mark.parametrize("text", CORPUS + DIGITS)
@pytest.mark.parametrize("skip", [True, False])
def test_the_pieces_are_the_text(smol: Tokenizer, text: str, skip: bool) -> None:
    ids = smol.encode(text)
    assert joined(stream(smol, [], ids, skip_special_tokens=skip)) == smol.decode(ids, skip)


@pytest.mark.parametrize("name", ["smol", "spm"])
def test_wherever_a_prompt_ends_the_rest_of_the_text_follows(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode("ab é 日本語🦄🧬 c ab")
    for cut in range(2, len(ids)):
        shown = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert joined(stream(tokenizer, ids[:cut], ids[cut:])) in tokenizer.decode(ids)
        pieces = stream(tokenizer, ids[:cut], ids[cut:])
        if not tokenizer.decode(ids[:cut]).endswith("\ufffd"):
            assert shown + joined(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["smol", "spm"])
def test_a_character_begun_in_the_prompt_is_shown_when_it_is_complete(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode("日" * 6 + "🧬")
    after = tokenizer.encode(" c", add_special_tokens=False)[-1:]
    for given_bytes in (1, 2):
        pieces = stream(tokenizer, ids[:-given_bytes], [*ids[-given_bytes:], *after])
        assert pieces[:given_bytes] == [None] * (given_bytes - 1) + ["🧬"]
        assert joined(pieces).startswith("🧬")


def test_half_a_character_is_held_back(smol: Tokenizer) -> None:
    ids = smol.encode("🧬")
    assert stream(smol, [], ids) == [None] * (len(ids) - 1) + ["🧬"]


def test_bytes_that_are_no_character_show_as_replacements_once_text_follows(smol: Tokenizer) -> None:
    first, *_ = smol.encode("🧬")
    assert stream(smol, [504], [first, first, 504]) == [None, None, "\ufffd\ufffdThe"]


def test_a_prompt_of_broken_bytes_is_not_repeated(smol: Tokenizer) -> None:
    continuation = smol.token_to_id("¬")
    assert continuation is not None
    assert stream(smol, [continuation] * 100, [504]) == ["The"]


def test_text_that_changes_what_was_shown_starts_afresh(spm: Tokenizer) -> None:
    ids = [spm.token_to_id(t) for t in ("<0x41>", "<0xC3>", "<0x42>", "▁a")]
    assert stream(spm, [], [i for i in ids if i is not None])[0] == "A"
    assert stream(spm, [], [i for i in ids if i is not None])[-1] == "a"


def test_special_tokens_show_only_when_asked(smol: Tokenizer) -> None:
    assert stream(smol, [504], [2, 504], skip_special_tokens=True) == [None, "The"]
    assert stream(smol, [504], [2, 504], skip_special_tokens=False) == ["<|im_end|>", "The"]


def test_added_tokens_that_follow_each_other_may_go_without_spaces(spm: Tokenizer) -> None:
    eos = 2
    flags = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert stream(spm, [], [eos, eos, spm.token_to_id("▁a") or 0, eos], **flags) == ["</s>", "</s>", " a", "</s>"]


@pytest.mark.parametrize("token_id", [49152, 2**31, 2**32, 2**63, -1])
def test_ids_outside_the_vocabulary_have_no_text(smol: Tokenizer, token_id: int) -> None:
    assert stream(smol, [504, token_id], [token_id, 504]) == [None, "The"]
    assert smol.decode([504, token_id, 504]) == "TheThe"
    assert smol.convert_ids_to_tokens([token_id]) == [""]
    assert smol.token_bytes(token_id) == b""


def test_a_leading_space_survives_after_a_prompt(spm: Tokenizer) -> None:
    a = spm.token_to_id("▁a")
    assert a is not None
    assert stream(spm, [1, a], [a, a]) == [" a", " a"]
    assert stream(spm, [], [a, a]) == ["a", " a"]


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 49151), max_size=12),
    ids=st.lists(st.integers(0, 49151), min_size=1, max_size=40),
)
def test_any_ids_stream_to_their_text(smol: Tokenizer, prompt: list[int], ids: list[int]) -> None:
    whole = joined(stream(smol, [], ids))
    assert smol.decode(ids).startswith(whole)
    assert smol.decode(ids)[len(whole) :].strip("\ufffd") == ""
    after_prompt = joined(stream(smol, prompt, [*ids, 504]))
    assert after_prompt.endswith("The")


# ---- single tokens ----


@pytest.mark.parametrize("text", [*CORPUS, *DIGITS])
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(smol: Tokenizer, text: str) -> None:
    assert b"".join(map(smol.token_bytes, smol.encode(text))) == text.encode()


def test_bytes_of_sentencepiece_tokens(spm: Tokenizer) -> None:
    by_text = {"<0x0A>": b"\n", "▁ab": b" ab", "é": "é".encode(), "<s>": b"<s>", "<|user|>": b"<|user|>", "  ": b"  "}
    for token, expected in by_text.items():
        token_id = spm.token_to_id(token)
        assert token_id is not None
        assert spm.token_bytes(token_id) == expected
