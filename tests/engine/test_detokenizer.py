"""Text from ids, one id at a time, up to a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fakes import EOS, byte_tokenizer
from vllm_clone.engine.detokenizer import Detokenizer
from vllm_clone.sampling_params import SamplingParams

TOKENIZER = byte_tokenizer()


def detokenizer(**params) -> Detokenizer:
    return Detokenizer(TOKENIZER, [], SamplingParams(**params))


def feed(d: Detokenizer, text: str) -> str | None:
    return d.update(list(text.encode()), False)


def test_characters_appear_when_their_last_byte_has_come() -> None:
    d, texts = detokenizer(), []
    for byte in "aé€😀b".encode():
        d.update([byte], False)
        texts.append(d.text)
    assert texts == ["a", "a", "aé", "aé", "aé", "aé€", "aé€", "aé€", "aé€", "aé€😀", "aé€😀b"]


def test_the_prompt_completes_a_character_but_is_not_part_of_the_text() -> None:
    d = Detokenizer(TOKENIZER, list("hé".encode())[:-1], SamplingParams())
    d.update([*"é".encode()[1:], ord("x")], False)
    assert d.text == "éx"


def test_without_detokenize_there_is_no_text() -> None:
    d = detokenizer(detokenize=False)
    feed(d, "abc")
    assert (d.text, d.token_ids) == ("", [97, 98, 99])


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a</s>b")])
def test_special_tokens_show_only_when_asked_for(skip: bool, text: str) -> None:
    d = detokenizer(skip_special_tokens=skip)
    d.update([97, EOS, 98], False)
    assert d.text == text


def test_the_space_between_added_tokens_is_the_callers_choice() -> None:
    seen = []

    class Recorder:
        def new_decode_stream(self, *args):
            seen.append(args)

    Detokenizer(Recorder(), [1], SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False))
    assert seen == [([1], False, False)]


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_the_token_that_ends_a_sequence_shows_only_when_asked_for(include: bool, text: str) -> None:
    d = detokenizer(include_stop_str_in_output=include)
    d.update([97, 98], True)
    assert d.text == text
    assert d.token_ids == [97, 98]


@pytest.mark.parametrize(("include", "text"), [(False, "one, "), (True, "one, END")])
def test_a_stop_string_cuts_the_text(include: bool, text: str) -> None:
    d = detokenizer(stop=["END"], include_stop_str_in_output=include)
    assert feed(d, "one, END and more") == "END"
    assert d.text == text
    assert bytes(d.token_ids) == b"one, END", "ids after the completing one are dropped"


def test_the_stop_string_that_ends_first_wins() -> None:
    d = detokenizer(stop=["long tail", "ng"])
    assert feed(d, "a long tail") == "ng"
    assert d.text == "a lo"


def test_of_two_that_end_together_the_first_in_the_list_wins() -> None:
    d = detokenizer(stop=["cd", "bcd"])
    assert feed(d, "abcd") == "cd"


def test_text_that_may_start_a_stop_string_is_held_back() -> None:
    d = detokenizer(stop=["END"])
    feed(d, "abcE")
    assert d.text[: d.released(False)] == "ab"
    feed(d, "x")
    assert d.text[: d.released(False)] == "abc"
    assert d.text[: d.released(True)] == "abcEx"


def test_nothing_is_held_back_when_the_stop_string_is_included() -> None:
    d = detokenizer(stop=["END"], include_stop_str_in_output=True)
    feed(d, "abcE")
    assert d.released(False) == 4


def test_stop_strings_within_the_first_min_tokens_do_not_count() -> None:
    d = detokenizer(stop=["ab"], min_tokens=2)
    assert feed(d, "ab") is None
    assert feed(d, "ab") == "ab"
    assert d.text == "ab"


def test_a_stop_string_may_begin_within_the_first_min_tokens() -> None:
    d = detokenizer(stop=["ab"], min_tokens=1)
    assert feed(d, "ab") == "ab"


@given(
    text=st.text(alphabet="abé€😀 ", max_size=40),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    splits=st.lists(st.integers(1, 5), max_size=60),
)
def test_however_ids_come_the_text_is_that_up_to_the_first_stop_string(
    text: str, stop: list[str], include: bool, splits: list[int]
) -> None:
    ends = [(text.find(s) + len(s), i) for i, s in enumerate(stop) if s in text]
    expected, found = text, None
    if ends:
        end, which = min(ends)
        found = stop[which]
        expected = text[: end if include else end - len(found)]
    d = detokenizer(stop=stop, include_stop_str_in_output=include)
    ids, shown, result = list(text.encode()), 0, None
    while ids and result is None:
        count = splits.pop() if splits else 1
        result = d.update(ids[:count], False)
        ids = ids[count:]
        released = d.released(result is not None)
        assert released >= shown or result is not None, "what was shown is not taken back"
        assert len(d.text) >= shown
        shown = max(released, shown)
        assert expected.startswith(d.text[:shown])
    assert (d.text, result) == (expected, found)
