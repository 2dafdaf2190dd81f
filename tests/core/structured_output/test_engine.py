"""Constrained requests in the scheduler, the engine's step and its loop, with a model that says the first token that
its grammar allows."""

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.core.structured_output.test_manager import Gate
from tests.engine.fakes import EOS, FakeExecutor, byte_tokenizer, fake_config
from vllm_clone.core.engine_core import EngineCore
from vllm_clone.core.engine_loop import EngineLoop
from vllm_clone.core.structured_output.manager import GrammarManager
from vllm_clone.core.structured_output.vocabulary import Vocabulary
from vllm_clone.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ShutdownRequest,
)
from vllm_clone.sampling_params import SamplingParams, StructuredOutputsParams

TIMEOUT = 30


def byte_vocabulary() -> Vocabulary:
    tokenizer = byte_tokenizer()
    return Vocabulary([*(bytes([i]) for i in range(256)), b""], frozenset({EOS}), {EOS: b"</s>"}, (EOS,),
                      lambda text: tokenizer.encode(text, add_special_tokens=False))  # fmt: skip


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def engine(num_blocks: int = 4096) -> EngineCore:
    config = fake_config(num_blocks=num_blocks, max_model_len=64)
    core = EngineCore(config, FakeExecutor)
    core.grammars = core.scheduler.grammars = GrammarManager(config, load=lambda _: byte_vocabulary(), num_threads=1)
    return core


def request(name: str, regex: str | None = None, prompt: str = "Q", **params: object) -> EngineCoreRequest:
    structured = None if regex is None else StructuredOutputsParams(regex=regex)
    resolved = {"max_tokens": 20, "eos_token_id": EOS, "stop_set": [EOS], **params}
    sampling = SamplingParams(structured_outputs=structured, **resolved)  # type: ignore[arg-type]
    return EngineCoreRequest(name, list(prompt.encode()), sampling, 0.0)


def run(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[EngineCoreOutput]]:
    """Every request's outputs."""
    outputs: dict[str, list[EngineCoreOutput]] = {r.request_id: [] for r in requests}
    for r in requests:
        assert core.add_request(r) is None
    known = list(core.scheduler.requests.values())  # all begin together, however long their grammars take
    core.grammars.wait(lambda: all(r.grammar is None or r.grammar.is_compiled for r in known))
    while core.num_unfinished or core.has_work:
        core.wait_for_grammars()
        for batch in core.step().values():
            for output in batch.outputs:
                outputs[output.request_id].append(output)
    return outputs


def text(outputs: list[EngineCoreOutput]) -> str:
    return bytes(i for o in outputs for i in o.new_token_ids if i != EOS).decode()


def test_constrained_and_free_requests_share_a_batch():
    found = run(engine(), request("a", "[0-9]{3}"), request("free", max_tokens=5), request("b", "ok"))
    assert text(found["a"]) == "000"
    assert found["a"][-1].finish_reason is FinishReason.STOP
    assert found["a"][-1].new_token_ids == [EOS], "the end of the text is a token of the answer"
    assert text(found["free"]) == "abcde"
    assert text(found["b"]) == "ok"


def test_a_grammar_is_followed_to_its_end_with_ignore_eos_too():
    found = run(engine(), request("a", "xy", ignore_eos=True))
    assert text(found["a"]) == "xy"
    assert found["a"][-1].finish_reason is FinishReason.STOP


def test_max_tokens_cuts_a_text_that_is_not_complete():
    found = run(engine(), request("a", "[0-9]{9}", max_tokens=4))
    assert text(found["a"]) == "0000"
    assert found["a"][-1].finish_reason is FinishReason.LENGTH


def test_a_preempted_request_goes_on_where_its_grammar_was():
    core = engine(num_blocks=5)  # four of 16 tokens; both fit at first, not to their end
    found = run(
        core, request("a", "[0-9]{30}", "A" * 12, max_tokens=40), request("b", "z{30}", "B" * 12, max_tokens=40)
    )
    assert text(found["a"]) == "0" * 30
    assert text(found["b"]) == "z" * 30
    assert found["a"][-1].num_preemptions + found["b"][-1].num_preemptions > 0


def test_a_request_that_waits_for_its_grammar_holds_up_nobody(gate: Gate):
    core = engine()
    assert core.add_request(request("slow", "slow!")) is None
    assert not core.has_work, "a loop would spin"
    assert core.num_unfinished == 1
    assert core.add_request(request("free", max_tokens=3)) is None
    free = []
    while core.has_work:
        free += [output for batch in core.step().values() for output in batch.outputs]
    assert text(free) == "abc"
    stats = core.scheduler.make_stats()
    assert (stats.num_waiting, stats.num_waiting_deferred) == (1, 1)
    gate.open.set()
    core.wait_for_grammars()
    slow = []
    while core.has_work:
        slow += [output for batch in core.step().values() for output in batch.outputs]
    assert text(slow) == "slow!"
    assert core.num_unfinished == 0


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone():
    found = run(engine(), request("bad", "(["), request("good", "ok"))
    assert [(o.finish_reason, o.error_kind) for o in found["bad"]] == [(FinishReason.ERROR, "invalid")]
    assert "unclosed character class" in (found["bad"][0].error or "")
    assert text(found["good"]) == "ok"


def test_a_token_that_the_grammar_forbids_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeExecutor, "_permitted", lambda self, request_id, token: token)  # deaf to masks
    found = run(engine(), request("deaf", "[0-9]+"), request("free", max_tokens=3))
    assert [(o.finish_reason, o.error_kind) for o in found["deaf"]] == [(FinishReason.ERROR, "invalid")]
    assert "allows no token here" in (found["deaf"][0].error or "")
    assert text(found["free"]) == "abc"


def test_an_aborted_request_leaves_nothing_behind(gate: Gate):
    core = engine()
    for name in ("slow", "fast"):
        assert core.add_request(request(name, "slow!" if name == "slow" else "[0-9]{9}")) is None
    core.abort_requests(["slow", "fast"])
    assert core.num_unfinished == 0
    gate.open.set()
    assert text(run(core, request("next", "ok"))["next"]) == "ok"
    assert not core.scheduler.constrained


def test_a_batch_without_grammars_carries_no_masks():
    seen = []

    class Watching(FakeExecutor):
        def execute_model(self, step):
            seen.append(step.grammar)
            return super().execute_model(step)

    core = EngineCore(fake_config(), Watching)
    run(core, request("free", max_tokens=3))
    assert seen
    assert set(seen) == {None}


# ---- the loop ----


class Loop:
    """An :class:`EngineLoop` in a thread, and what it sends."""

    def __init__(self, core: EngineCore) -> None:
        self.sent: queue.SimpleQueue[EngineCoreOutput] = queue.SimpleQueue()
        self.loop = EngineLoop(core, self._send)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def _send(self, client: int, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self.sent.put(output)

    def collect(self, until: Callable[[EngineCoreOutput], bool]) -> list[EngineCoreOutput]:
        found = [self.sent.get(timeout=TIMEOUT)]
        while not until(found[-1]):
            found.append(self.sent.get(timeout=TIMEOUT))
        return found


def is_last(output: EngineCoreOutput) -> bool:
    return output.finish_reason is not None


def test_the_loop_sleeps_while_a_grammar_is_compiled_and_wakes_when_it_is_done(gate: Gate):
    core = engine()
    steps = []
    step = core.step
    core.step = lambda: steps.append(1) or step()  # type: ignore[method-assign, func-returns-value]
    made = Loop(core)
    made.loop.put(request("slow", "slow!"))
    assert gate.entered.acquire(timeout=TIMEOUT)
    made.loop.put(request("free", max_tokens=3))
    assert text(made.collect(is_last)) == "abc"
    num_steps = len(steps)
    assert num_steps < 10, "it turns only for what can go on"
    gate.open.set()
    assert text(made.collect(is_last)) == "slow!"
    made.loop.put(ShutdownRequest())
    made.thread.join(TIMEOUT)
    assert not made.thread.is_alive()


def test_the_loop_gives_up_a_compilation_that_takes_too_long(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_REGEX_COMPILATION_TIMEOUT_S", "0.05")
    made = Loop(engine())
    made.loop.put(request("slow", "slow!"))
    (output,) = made.collect(is_last)
    assert output.finish_reason is FinishReason.ERROR
    assert "takes longer than 0.05 s" in (output.error or "")
    made.loop.put(ShutdownRequest())
    made.thread.join(TIMEOUT)
    assert not made.thread.is_alive()


def test_a_draining_loop_waits_for_grammars_and_an_impatient_one_does_not(gate: Gate):
    made = Loop(engine())
    made.loop.put(request("slow", "slow!"))
    assert gate.entered.acquire(timeout=TIMEOUT)
    made.loop.put(ShutdownRequest(timeout=1000.0))
    gate.open.set()
    assert text(made.collect(is_last)) == "slow!"
    made.thread.join(TIMEOUT)
    gate.open.clear()
    made = Loop(engine())
    made.loop.put(request("slow", "slow too"))
    assert gate.entered.acquire(timeout=TIMEOUT)
    made.loop.put(ShutdownRequest())
    (output,) = made.collect(is_last)
    assert output.finish_reason is FinishReason.ABORT
    made.thread.join(TIMEOUT)
    assert not made.thread.is_alive()


def test_a_request_that_waits_for_its_grammar_can_be_aborted(gate: Gate):
    made = Loop(engine())
    made.loop.put(request("slow", "slow!"))
    assert gate.entered.acquire(timeout=TIMEOUT)
    made.loop.put(AbortRequests(["slow"]))
    made.loop.put(request("free", max_tokens=2))
    assert text(made.collect(is_last)) == "ab"
    made.loop.put(ShutdownRequest(timeout=1000.0))
    made.thread.join(TIMEOUT)
    assert not made.thread.is_alive(), "nothing is left to wait for"
