"""The synchronous engine: the same pipe without an event loop."""

import pytest

from tests.engine.fakes import CRASH, FakeExecutor, byte_tokenizer, expected_text, fake_config
from vllm_clone.config import VllmConfig
from vllm_clone.engine.inputs import TokensPrompt
from vllm_clone.engine.llm_engine import LLMEngine
from vllm_clone.errors import RequestError
from vllm_clone.sampling_params import RequestOutputKind, SamplingParams

FINAL, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> LLMEngine:
    return make(fake_config(), monkeypatch)


def make(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> LLMEngine:
    monkeypatch.setattr("vllm_clone.engine.llm_engine.get_tokenizer", lambda *args: byte_tokenizer())
    return LLMEngine(config, FakeExecutor)


def finish(engine: LLMEngine):
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    return outputs


def test_requests_finish_with_their_texts(engine: LLMEngine) -> None:
    for prompt in ("a", "hello", "zz"):
        engine.add_request(prompt, prompt, SamplingParams(max_tokens=30, output_kind=FINAL))
    texts = {o.request_id: o.outputs[0].text for o in finish(engine)}
    assert texts == {p: expected_text(p, 30) for p in ("a", "hello", "zz")}


@pytest.mark.parametrize(("interval", "sent_after"), [(1, list(range(1, 11))), (4, [1, 5, 9, 10]), (50, [1, 10])])
@pytest.mark.parametrize("level", ["server", "request"])
def test_the_first_and_last_token_and_every_nth_are_emitted(
    interval: int, sent_after: list[int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config()
    config.scheduler_config.stream_interval = interval if level == "server" else 1
    engine = make(config, monkeypatch)
    own = interval if level == "request" else None
    engine.add_request("r", "a", SamplingParams(max_tokens=10, output_kind=DELTA, stream_interval=own))
    counts, total = [], 0
    for output in finish(engine):
        total += len(output.outputs[0].token_ids)
        counts.append(total)
    assert counts == sent_after


def test_a_request_can_raise_the_interval_but_not_lower_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config()
    config.scheduler_config.stream_interval = 4
    engine = make(config, monkeypatch)
    engine.add_request("r", "a", SamplingParams(max_tokens=10, output_kind=DELTA, stream_interval=2))
    assert len(finish(engine)) == 4


def test_a_delta_without_text_has_empty_logprobs_only_when_it_has_no_tokens(engine: LLMEngine) -> None:
    engine.add_request("r", "a", SamplingParams(max_tokens=6, stop=["cdefgh"], logprobs=0, output_kind=DELTA))
    for output in finish(engine):
        choice = output.outputs[0]
        assert len(choice.logprobs) == len(choice.token_ids)


def test_an_aborted_request_says_so_and_shows_the_text_that_was_held_back(engine: LLMEngine) -> None:
    engine.add_request("r", "a", SamplingParams(max_tokens=50, stop=["never this"], output_kind=DELTA))
    shown = "".join(o.outputs[0].text for _ in range(5) for o in engine.step())
    engine.abort_request(["r", "unknown"])
    (last,) = finish(engine)
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert shown + last.outputs[0].text == "bcdef"
    assert engine.core.get_state()["running"] == 0


def test_prompt_scores_come_once_in_a_stream_and_always_otherwise(engine: LLMEngine) -> None:
    engine.add_request("d", "abc", SamplingParams(max_tokens=3, prompt_logprobs=0, output_kind=DELTA))
    first, *rest = finish(engine)
    assert [None if p is None else list(p) for p in first.prompt_logprobs] == [None, [98], [99]]
    assert all(o.prompt_logprobs is None for o in rest)
    engine.add_request("c", "abc", SamplingParams(max_tokens=3, prompt_logprobs=0))
    assert all(len(o.prompt_logprobs) == 3 for o in finish(engine))


def test_an_invalid_request_raises_and_leaves_nothing(engine: LLMEngine) -> None:
    with pytest.raises(RequestError):
        engine.add_request("r", TokensPrompt([99999]), SamplingParams())
    assert not engine.has_unfinished_requests


def test_a_request_the_engine_cannot_hold_ends_with_an_error(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.core.scheduler.kv, "can_ever_fit", lambda tokens: tokens < 20)
    engine.add_request("big", "a", SamplingParams(max_tokens=50, output_kind=FINAL))
    engine.add_request("small", "a", SamplingParams(max_tokens=5, output_kind=FINAL))
    outputs = {o.request_id: o.outputs[0] for o in finish(engine)}
    assert outputs["big"].finish_reason == "error"
    assert "KV cache" in outputs["big"].stop_reason
    assert outputs["small"].text == "bcdef"


def test_a_failing_detokenizer_ends_only_its_request(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add_request("bad", "a", SamplingParams(max_tokens=50, output_kind=FINAL))
    engine.add_request("good", "a", SamplingParams(max_tokens=5, output_kind=FINAL))
    (state,) = engine.output_processor._by_request["bad"]
    (sequence,) = state.open.values()
    monkeypatch.setattr(sequence._detokenizer, "update", lambda *args: 1 / 0)
    outputs = {o.request_id: o.outputs[0] for o in finish(engine)}
    assert outputs["bad"].finish_reason == "error"
    assert outputs["good"].text == "bcdef"
    assert engine.core.get_state()["running"] == 0


def test_a_crash_in_the_model_is_raised_to_the_caller(engine: LLMEngine) -> None:
    engine.add_request("r", TokensPrompt([CRASH]), SamplingParams())
    with pytest.raises(RuntimeError, match="the fake model crashed"):
        engine.step()
