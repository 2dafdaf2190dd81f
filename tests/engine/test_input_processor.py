"""What is refused before the engine sees it, and what is filled in."""

import pytest

from tests.engine.fakes import EOS, VOCAB, byte_tokenizer, fake_config
from vllm_clone.engine.input_processor import InputProcessor
from vllm_clone.engine.inputs import TokensPrompt
from vllm_clone.errors import RequestError
from vllm_clone.sampling_params import SamplingParams

LIMIT = 32


def processor(tokenizer=None, **model) -> InputProcessor:
    return InputProcessor(fake_config(max_model_len=LIMIT, **model), tokenizer or byte_tokenizer())


def process(prompt="abc", processor=None, **params):
    return (processor or PROCESSOR).process("r", prompt, SamplingParams(**params))


PROCESSOR = processor()


def refused(prompt="abc", **params) -> RequestError:
    with pytest.raises(RequestError) as caught:
        process(prompt, **params)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "params", "param", "facts"),
    [
        (TokensPrompt([]), {}, None, ["empty"]),
        (TokensPrompt([VOCAB]), {}, None, [VOCAB]),
        (TokensPrompt([-1]), {}, None, [-1]),
        (TokensPrompt([1] * (LIMIT + 1)), {}, "input_tokens", [LIMIT, LIMIT + 1]),
        ("x" * (LIMIT + 1), {}, "input_tokens", [LIMIT, LIMIT + 1]),
        ("x" * 10_000, {}, "input_text", [LIMIT]),
        (TokensPrompt([1] * LIMIT), {}, "max_tokens", [0]),
        ("abc", {"max_tokens": LIMIT + 1}, "max_tokens", [LIMIT, LIMIT + 1]),
        ("abc", {"max_tokens": 0}, "max_tokens", [1, 0]),
        ("abc", {"max_tokens": None, "min_tokens": LIMIT}, None, [LIMIT, LIMIT - 3]),
        ("abc", {"logprobs": 21}, "logprobs", [21, 20]),
        ("abc", {"logprobs": -1}, "logprobs", [VOCAB, 20]),
        ("abc", {"prompt_logprobs": 21}, "prompt_logprobs", [21, 20]),
        ("abc", {"stop_token_ids": [VOCAB]}, "stop_token_ids", [VOCAB]),
        ("abc", {"allowed_token_ids": [VOCAB]}, "allowed_token_ids", [VOCAB]),
        ("abc", {"allowed_token_ids": []}, "allowed_token_ids", ["empty"]),
        ("abc", {"logit_bias": {VOCAB: 1.0}}, "logit_bias", [VOCAB]),
        ("abc", {"logit_bias": {5: float("nan")}}, "logit_bias", ["NaN", 5]),
        ("abc", {"logprob_token_ids": [-1], "logprobs": 1}, "logprob_token_ids", [-1]),
        ("abc", {"bad_words": [f"w{i}" for i in range(200)]}, "bad_words", [128]),
        ("abc", {"truncate_prompt_tokens": LIMIT + 1}, "truncate_prompt_tokens", [LIMIT, LIMIT + 1]),
        ("abc", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", [-1, -2]),
        ("abc", {"truncate_prompt_tokens": 0}, None, ["empty"]),
        ("abc", {"temperature": 3.0}, "temperature", [3.0]),
        ("abc" * 9, {"n": 16000, "stop_token_ids": list(range(5, VOCAB))}, None, [16000, "4000000"]),
        ("abc", {"allowed_token_ids": [EOS], "min_tokens": 2}, "allowed_token_ids", ["min_tokens"]),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_facts(prompt, params, param, facts) -> None:
    error = refused(prompt, **params)
    assert error.kind == "invalid"
    assert error.param == param
    assert all(str(fact) in str(error) for fact in facts)


def test_max_tokens_defaults_to_the_rest_of_the_context_and_never_exceeds_it() -> None:
    assert process(max_tokens=None).params.max_tokens == LIMIT - 3
    assert process(max_tokens=LIMIT).params.max_tokens == LIMIT - 3
    assert process(max_tokens=4).params.max_tokens == 4


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    assert process(TokensPrompt([1] * (LIMIT - 1))).params.max_tokens == 1


def test_the_callers_parameters_stay_as_they_are() -> None:
    params = SamplingParams(max_tokens=None, stop_token_ids=[5], logit_bias={1: 500.0})
    PROCESSOR.process("r", "abc", params)
    assert params == SamplingParams(max_tokens=None, stop_token_ids=[5], logit_bias={1: 500.0})


def test_eos_and_its_companions_from_the_generation_config() -> None:
    config = fake_config(max_model_len=LIMIT)
    config.model_config.eos_token_ids = [7, EOS]
    processor = InputProcessor(config, byte_tokenizer())
    normal = process(processor=processor, stop_token_ids=[9]).params
    assert normal.eos_token_id == EOS
    assert normal.stop_token_ids == [9, 7]
    ignoring = process(processor=processor, stop_token_ids=[9], ignore_eos=True).params
    assert ignoring.stop_token_ids == [9]
    assert set(normal.stop_set) == set(ignoring.stop_set) == {7, 9, EOS}


def test_logit_bias_is_clamped() -> None:
    assert process(logit_bias={1: 500.0, 2: -500.0, 3: 2.5}).params.logit_bias == {1: 100.0, 2: -100.0, 3: 2.5}


def test_the_whole_vocabulary_may_be_asked_for_when_the_limit_is_lifted() -> None:
    assert process(processor=processor(max_logprobs=-1), logprobs=-1).params.logprobs == -1


@pytest.mark.parametrize(("keep", "kept"), [(2, "bc"), (3, "abc"), (10, "abc")])
def test_truncation_keeps_the_last_tokens(keep: int, kept: str) -> None:
    assert bytes(process("abc", truncate_prompt_tokens=keep).prompt_token_ids) == kept.encode()


def test_truncation_to_the_context_leaves_room_for_one_token() -> None:
    request = process("x" * 10_000, truncate_prompt_tokens=-1)
    assert len(request.prompt_token_ids) == LIMIT - 1
    assert request.params.max_tokens == 1


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    class Words:
        """A vocabulary in which 'cat' and ' cat' are single tokens and ' xy' is longer than 'xy'."""

        eos_token_id = None
        max_chars_per_token = 4

        def encode(self, text, add_special_tokens=True):
            return {"cat": [1], " cat": [2], "xy": [3], " xy": [4, 3]}.get(text, [9])

    params = process(processor=processor(Words()), bad_words=["cat", "xy"]).params
    assert params.bad_words_token_ids == [[1], [2], [3]]


def test_each_choice_is_a_sequence_with_its_own_seed() -> None:
    request = process(n=3, seed=7)
    assert [s.sampling_params.seed for s in request.sequences] == [7, 8, 9]
    assert [s.sampling_params.n for s in request.sequences] == [1, 1, 1]
    assert len({s.request_id for s in request.sequences}) == 3
    assert request.params.n == 3


def test_seeds_stay_within_64_bits() -> None:
    assert [s.sampling_params.seed for s in process(n=2, seed=2**63 - 1).sequences] == [2**63 - 1, -(2**63)]


def test_without_a_seed_every_sequence_draws_its_own_and_a_new_start_repeats_them() -> None:
    def draw() -> list[int | None]:
        fresh = processor()
        return [s.sampling_params.seed for _ in range(2) for s in process(processor=fresh, n=2).sequences]

    assert len(set(draw())) == 4
    assert draw() == draw()


def test_equal_request_ids_give_different_sequence_ids() -> None:
    assert process().sequences[0].request_id != process().sequences[0].request_id


def test_without_a_tokenizer_token_ids_work_and_texts_are_refused() -> None:
    bare = InputProcessor(fake_config(max_model_len=LIMIT), None)
    assert bare.process("r", TokensPrompt([1, 2]), SamplingParams()).prompt_token_ids == [1, 2]
    for prompt, params in (("abc", {}), (TokensPrompt([1]), {"stop": ["x"]})):
        with pytest.raises(RequestError, match="tokenizer"):
            bare.process("r", prompt, SamplingParams(**params))


def test_default_parameters_come_from_the_model() -> None:
    defaults = processor(generation_defaults={"temperature": 0.3, "top_k": 5, "transformers_version": "5"})
    assert defaults.default_params() == SamplingParams(temperature=0.3, top_k=5)
