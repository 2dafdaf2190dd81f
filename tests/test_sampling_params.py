"""What Python callers may pass as sampling parameters."""

import pytest

from vllm_clone import SamplingParams
from vllm_clone.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"), ("top_k", 1.5), ("max_tokens", 2.5), ("logprobs", True), ("n", "2"), ("stop", 3),
        ("bad_words", "abc"), ("stop_token_ids", 5), ("logit_bias", [1]), ("seed", "x"), ("allowed_token_ids", 7),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_named(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_none_stands_for_an_empty_list() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])


def test_numbers_and_single_stop_strings_are_taken_as_they_are_meant() -> None:
    params = SamplingParams(temperature=1, top_p=1, stop="x", top_k=-1, seed=-1)
    assert (params.stop, params.top_k, params.seed) == (["x"], 0, None)
    params.verify()
