"""Token texts beside their scores."""

from tests.engine.fakes import byte_tokenizer
from vllm_clone.engine.logprobs import TokenTexts, position_logprobs, prompt_logprobs
from vllm_clone.messages import LogprobRows

TEXTS = TokenTexts(byte_tokenizer())


def test_the_sampled_token_comes_first_and_is_listed_once() -> None:
    rows = LogprobRows([[98, 97, 98, 99]], [[-2.0, -1.0, -2.0, -3.0]], [2])
    entries = position_logprobs(rows, 0, TEXTS, [])
    assert [(t, p.logprob, p.rank, p.decoded_token) for t, p in entries.items()] == [
        (98, -2.0, 2, "b"),
        (97, -1.0, 1, "a"),
        (99, -3.0, 3, "c"),
    ]


def test_a_sampled_token_outside_the_top_keeps_its_rank() -> None:
    rows = LogprobRows([[98, 97]], [[-5.0, -1.0]], [17])
    assert [(t, p.rank) for t, p in position_logprobs(rows, 0, None, []).items()] == [(98, 17), (97, 1)]


def test_a_token_that_completes_a_character_stands_for_the_whole_character() -> None:
    first, second, third = "€".encode()
    assert TEXTS.of(first, [97]) == ""
    assert TEXTS.of(second, [97, first]) == ""
    assert TEXTS.of(third, [97, first, second]) == "€"
    assert TEXTS.of(97, [first]) == "a"


def test_without_texts_there_are_none() -> None:
    assert position_logprobs(LogprobRows([[98]], [[-5.0]], [1]), 0, None, [])[98].decoded_token is None


def test_prompt_scores_start_at_the_second_token() -> None:
    rows = LogprobRows([[98], [99]], [[-1.0], [-2.0]], [4, 5])
    first, second, third = prompt_logprobs(rows, [97, 98, 99], TEXTS)
    assert first is None
    assert second is not None
    assert third is not None
    assert (second[98].rank, third[99].decoded_token) == (4, "c")


def test_a_prompt_of_one_token_has_no_scores() -> None:
    assert prompt_logprobs(None, [97], TEXTS) == [None]
