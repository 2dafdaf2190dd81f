"""Compilations aside from the loop: the cache, the limits, and what a failure does."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.core.structured_output.words import EOS, PIECES, SIZE, vocabulary
from vllm_clone.config import ModelConfig, StructuredOutputsConfig, VllmConfig
from vllm_clone.core.request import Request
from vllm_clone.core.structured_output.backend import Backends
from vllm_clone.core.structured_output.grammar import Compiled, GrammarError, RequestGrammar
from vllm_clone.core.structured_output.manager import GrammarManager
from vllm_clone.core.structured_output.spec import GrammarSpec
from vllm_clone.errors import ConfigError, RequestError
from vllm_clone.messages import EngineCoreRequest
from vllm_clone.sampling_params import SamplingParams, StructuredOutputsParams
from vllm_clone.step import RunningRequests, SchedulerOutput

CONFIG = VllmConfig(
    model_config=ModelConfig(vocab_size=SIZE),
    structured_outputs_config=StructuredOutputsConfig(backend="guidance"),
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """Stands in for the libraries: counts what it compiles, and holds the regexes that begin with "slow"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        real = Backends.compile

        def compile(backends: Backends, spec: GrammarSpec) -> Compiled:
            self.texts.append(spec.text)
            if spec.text.startswith("slow"):
                self.entered.release()
                assert self.open.wait(30)
            return real(backends, spec)

        monkeypatch.setattr(Backends, "compile", compile)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def manager(**options: Any) -> GrammarManager:
    return GrammarManager(CONFIG, **{"load": lambda _: vocabulary(), "num_threads": 1, **options})


def core_request(regex: str, name: str = "r", **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex), stop_set=[EOS])
    return EngineCoreRequest(name, [65], params, 0.0, **fields)


def begin(made: GrammarManager, regex: str, **fields: Any) -> RequestGrammar:
    return made.begin(core_request(regex, **fields))


def ready(made: GrammarManager, regex: str, **fields: Any) -> RequestGrammar:
    grammar = begin(made, regex, **fields)
    made.wait(lambda: grammar.is_compiled)
    assert grammar.failure is None
    grammar.start()
    return grammar


def test_nothing_is_loaded_before_the_first_grammar():
    def load(config: VllmConfig) -> Any:
        raise AssertionError("loaded")

    before = set(threading.enumerate())
    manager(load=load)
    assert set(threading.enumerate()) <= before


def test_a_grammar_is_compiled_once_and_announced(gate: Gate):
    made, done = manager(), threading.Event()
    made.on_compiled = done.set
    first = begin(made, "slow a")
    assert not first.is_compiled, "begin does not wait"
    second = begin(made, "slow a")
    assert not done.is_set()
    gate.open.set()
    assert done.wait(30)
    assert first.is_compiled
    assert second.is_compiled
    assert ready(made, "slow a").failure is None
    assert gate.texts == ["slow a"]


def test_a_grammar_that_cannot_be_compiled_is_the_requests_own_error_and_is_remembered(gate: Gate):
    made = manager()
    for _ in range(2):
        grammar = begin(made, "([")
        made.wait(lambda: grammar.is_compiled)  # noqa: B023
        assert grammar.failure is not None
        assert grammar.failure.kind == "invalid"
        assert "unclosed character class" in grammar.failure.message
    assert gate.texts == ["(["]


def test_a_vocabulary_that_cannot_be_read_is_no_fault_of_the_request():
    def load(config: VllmConfig) -> Any:
        raise ConfigError("there is no tokenizer")

    made = manager(load=load)
    grammar = begin(made, "a")
    made.wait(lambda: grammar.is_compiled)
    assert grammar.failure is not None
    assert grammar.failure.kind == "internal"
    assert "there is no tokenizer" in grammar.failure.message


def test_one_that_takes_too_long_is_given_up_and_others_go_on(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_REGEX_COMPILATION_TIMEOUT_S", "2")
    clock = Clock()
    made = manager(clock=clock)
    slow, other = begin(made, "slow a"), begin(made, "b")
    assert gate.entered.acquire(timeout=30)
    clock.now += 1.5
    made.expire()
    assert not slow.is_compiled
    assert made.seconds_to_expiry == pytest.approx(0.5)
    clock.now += 0.5
    made.expire()
    assert slow.failure is not None
    assert slow.failure.kind == "invalid"
    assert "longer than 2 s" in slow.failure.message
    made.wait(lambda: other.is_compiled)
    assert other.failure is None, "the only thread is not lost to it"


def test_what_was_given_up_serves_later_requests_once_it_is_done(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_REGEX_COMPILATION_TIMEOUT_S", "2")
    clock, done = Clock(), threading.Event()
    made = manager(clock=clock)
    made.on_compiled = done.set
    begin(made, "slow a")
    assert gate.entered.acquire(timeout=30)
    clock.now += 2
    made.expire()
    assert begin(made, "slow a").failure is not None
    gate.open.set()
    assert done.wait(30)
    assert begin(made, "slow a").failure is None


def test_without_a_limit_nothing_is_given_up(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_REGEX_COMPILATION_TIMEOUT_S", "0")
    clock = Clock()
    made = manager(clock=clock)
    slow = begin(made, "slow a")
    assert gate.entered.acquire(timeout=30)
    clock.now += 1e9
    made.expire()
    assert not slow.is_compiled
    assert made.seconds_to_expiry is None


def test_the_cache_forgets_what_was_not_used_for_longest(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", "1")  # of which each takes about a fifth
    made = manager()
    kept = ready(made, "first")
    for i in range(3):
        ready(made, f"other {i}")
    ready(made, "first")
    for i in range(3, 6):
        ready(made, f"other {i}")
    gate.texts.clear()
    ready(made, "first")
    assert gate.texts == [], "it was used between the others"
    ready(made, "other 0")
    assert gate.texts == ["other 0"]
    assert kept.accept(ord("f")), "a request keeps what the cache forgets"


def test_a_closed_manager_begins_nothing(gate: Gate):
    made = manager()
    begin(made, "slow a")
    assert gate.entered.acquire(timeout=30)
    waiting = begin(made, "b")
    made.close()
    gate.open.set()
    made.wait(lambda: True)
    assert not waiting.is_compiled
    assert gate.texts == ["slow a"]


def test_constraints_that_contradict_each_other_are_refused_by_the_engine_too():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["b"]))
    with pytest.raises(RequestError, match="exactly one"):
        manager().begin(EngineCoreRequest("r", [65], params, 0.0))


# ---- masks ----


def running(made: GrammarManager, name: str, regex: str, num_computed: int, **fields: Any) -> Request:
    core = core_request(regex, name, **fields)
    request = Request(core)
    request.grammar = ready(made, regex, **fields)
    request.num_computed_tokens = num_computed
    return request


def ids(words: bytearray) -> set[int]:
    return {i for i in range(SIZE) if words[i >> 3] >> (i & 7) & 1}


def test_masks_are_of_the_requests_that_sample_in_this_step():
    made = manager()
    requests = {
        "first": running(made, "first", "x", 1),
        "idle": running(made, "idle", "y", 1),
        "prefill": running(made, "prefill", "z", 0),
        "last": running(made, "last", "yes|no", 1),
    }
    work = SchedulerOutput([], RunningRequests(), {"last": 1, "prefill": 1, "first": 1, "free": 1}, 4)
    masks = made.masks(work, requests)
    assert masks is not None
    assert masks.req_ids == ["first", "last"]
    size = len(masks.words) // 2
    assert size == (SIZE + 31) // 32 * 4
    assert ids(masks.words[:size]) == {ord("x")}
    assert ids(masks.words[size:]) >= {ord("y"), ord("n"), 259 + PIECES.index(b"no")}


def test_a_step_without_constrained_rows_has_no_masks():
    made = manager()
    work = SchedulerOutput([], RunningRequests(), {"other": 1}, 1)
    assert made.masks(work, {"idle": running(made, "idle", "y", 1)}) is None


THINK_END = [60, 47, 62]  # </>


def test_a_chain_of_thought_is_free_and_the_grammar_begins_after_its_end():
    made = manager()
    request = running(made, "r", "yes", 1, grammar_begins_after=THINK_END)
    grammar = request.grammar
    assert grammar is not None
    work = SchedulerOutput([], RunningRequests(), {"r": 1}, 1)
    for token in [*b"so </ or <", *THINK_END]:
        assert made.masks(work, {"r": request}) is None
        assert grammar.accept(token)
    masks = made.masks(work, {"r": request})
    assert masks is not None
    assert ids(masks.words) == {259 + PIECES.index(b"yes")}
    assert not grammar.accept(ord("x"))


def test_enable_in_reasoning_constrains_the_chain_of_thought_too():
    config = VllmConfig(
        model_config=ModelConfig(vocab_size=SIZE),
        structured_outputs_config=StructuredOutputsConfig(backend="guidance", enable_in_reasoning=True),
    )
    made = GrammarManager(config, load=lambda _: vocabulary(), num_threads=1)
    assert ready(made, "yes", grammar_begins_after=THINK_END).is_active


def test_a_failing_backend_is_said_in_the_log_and_to_the_client(monkeypatch: pytest.MonkeyPatch):
    def compile(backends: Backends, spec: GrammarSpec) -> Compiled:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Backends, "compile", compile)
    made = manager()
    grammar = begin(made, "a")
    made.wait(lambda: grammar.is_compiled)
    assert grammar.failure is not None
    assert grammar.failure.kind == "internal"
    assert "ZeroDivisionError: oops" in grammar.failure.message
    assert not isinstance(grammar.failure, GrammarError)
