"""Random traffic against small pools: nothing leaks, nothing is shared wrongly, every request ends, and every
output is what an unconstrained run gives.

The traffic comes twice: from hypothesis, which searches and shrinks, and from seeds, which spread evenly.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.harness import (
    EOS,
    Engine,
    check_invariants,
    core_request,
    expected_output,
    full,
    make_scheduler,
    sliding,
)
from vllm_clone.messages import EngineCoreRequest, FinishReason, PrefillStats

MAX_MODEL_LEN = 40
CONFIGS: dict[str, list[Any]] = {
    "specs": [
        [full()],
        [sliding(5)],
        [full(), sliding(6)],
        [full(), sliding(1), sliding(9)],
        [full(), sliding(8), sliding(8)],
        [full(), full()],
    ],
    "room": [1.0, 1.2, 1.5, 2.5],
    "budget": [4, 7, 16, 64],
    "max_num_seqs": [3, 6, 6, 12],
    "policy": ["fcfs", "priority"],
    "caching": [True, True, True, False],
    "chunked": [True, True, False],
    "reserve_full": [True, False],
    "long_prefill": [0, 0, 3],
    "watermark": [0.0, 0.0, 0.2],
}
REQUESTS: dict[str, list[Any]] = {
    "family": [0, 0, 1],
    "shared": [0, 2, 4, 8, 11, 12, 16, 20],
    "own": [1, 2, 3, 4],
    "max_tokens": [1, 8, 15, 30],
    "priority": [0, 1, 2],
    "salt": [None, None, None, "a"],
    "prompt_logprobs": [None, None, None, 0],
    "ignore_eos": [True, False],
}


class Traffic:
    """One engine, what was sent to it, and the checks on what it answers."""

    def __init__(self, specs: list[Any], room: float, budget: int, chunked: bool, **options: Any) -> None:
        """``room`` is the pool's size in full-length requests of full-attention groups."""
        self.sent: dict[str, EngineCoreRequest] = {}
        self.aborted: set[str] = set()
        budget = budget if chunked else MAX_MODEL_LEN
        options |= {"num_blocks": 1 + int(room * len(specs) * MAX_MODEL_LEN // 4), "max_model_len": MAX_MODEL_LEN}
        self.engine = Engine(make_scheduler(*specs, budget=budget, chunked=chunked, **options))

    def send(self, family: int, shared: int, own: int, **options: Any) -> None:
        prompt = [1000 * family + i for i in range(shared)] + [7000 + own] * own
        self._send(prompt, eos_token_id=EOS, **options)

    def send_next_turn(self, choice: int) -> None:
        """Continue a finished conversation: its prompt and answer start the new prompt."""
        done = [n for n, out in self.engine.last.items() if out.finish_reason is FinishReason.LENGTH]
        if done:
            turn = self.sent[done[choice % len(done)]]
            prompt = turn.prompt_token_ids + self.engine.tokens[turn.request_id] + [9000]
            self._send(prompt[: MAX_MODEL_LEN - 1], max_tokens=6, salt=turn.cache_salt)

    def step(self) -> None:
        scheduler = self.engine.scheduler
        had_work = bool(scheduler.requests)
        step = scheduler.schedule()
        counts = step.num_scheduled_tokens
        assert step.total_num_scheduled_tokens == sum(counts.values()) <= scheduler.max_tokens_per_step
        assert all(count >= 1 for count in counts.values())
        assert all(new.num_computed_tokens < len(new.token_ids) for new in step.new)
        assert not (step.new and step.preempted_req_ids), "no admission in a step that preempted"
        assert counts or not had_work, "a step with work made no progress"
        self.engine.finish_step(step)

    def abort(self, choice: int) -> None:
        name = self._live(choice)
        if name is not None:
            ended = self.engine.scheduler.finish_requests([name, "unknown"])
            assert [r.request_id for r in ended] == [name]
            self.aborted.add(name)

    def abort_while_a_step_runs(self, choice: int) -> None:
        step = self.engine.scheduler.schedule()
        result = self.engine.runner.execute(step)
        self.abort(choice)
        self.engine.take_in(step, result)

    def reset_prefix_cache(self) -> None:
        running = bool(self.engine.scheduler.running)
        assert self.engine.scheduler.reset_prefix_cache() is not running

    def finish(self) -> None:
        """Let everything end, then compare every answer with the unconstrained one."""
        self.engine.run()
        scheduler = self.engine.scheduler
        assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks - 1
        assert scheduler.reset_prefix_cache()
        assert not self.engine.runner.requests
        for name, request in self.sent.items():
            self._check_answer(name, request)

    def _send(self, prompt: list[int], **options: Any) -> None:
        request = core_request(f"r{len(self.sent)}", prompt, **options)
        self.sent[request.request_id] = request
        self.engine.add(request)

    def _live(self, choice: int) -> str | None:
        live = list(self.engine.scheduler.requests)
        return live[choice % len(live)] if live else None

    def _check_answer(self, name: str, request: EngineCoreRequest) -> None:
        tokens, reason = expected_output(request, MAX_MODEL_LEN)
        got = self.engine.tokens.get(name, [])
        if name in self.aborted:
            assert got == tokens[: len(got)]
            return
        assert (got, self.engine.last[name].finish_reason) == (tokens, reason)
        first, *later = self.engine.outputs[name]
        assert isinstance(first.prefill_stats, PrefillStats)
        assert first.prefill_stats.num_prompt_tokens == len(request.prompt_token_ids)
        assert all(output.prefill_stats is None and output.prompt_logprobs is None for output in later)
        if request.sampling_params.prompt_logprobs is not None:
            assert first.prompt_logprobs is not None
            assert [row[0] for row in first.prompt_logprobs.token_ids] == request.prompt_token_ids[1:]


@pytest.mark.parametrize("seed", range(150))
def test_seeded_traffic_is_answered_as_if_unconstrained(seed: int) -> None:
    rng = random.Random(seed)
    traffic = Traffic(**{name: rng.choice(values) for name, values in CONFIGS.items()})
    for _ in range(rng.randrange(5, 40)):
        for _ in range(rng.choice([0, 1, 1, 3])):
            traffic.send(**{name: rng.choice(values) for name, values in REQUESTS.items()})
        for _ in range(rng.choice([1, 1, 2, 6])):
            traffic.step()
        event = rng.random()
        if event < 0.1:
            traffic.abort(rng.randrange(100))
        elif event < 0.2:
            traffic.abort_while_a_step_runs(rng.randrange(100))
        elif event < 0.4:
            traffic.send_next_turn(rng.randrange(100))
        elif event < 0.45:
            traffic.reset_prefix_cache()
    traffic.finish()


class TrafficMachine(RuleBasedStateMachine):
    """Rules are what a client or the engine loop may do, in any order."""

    traffic: Traffic

    @initialize(config=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CONFIGS.items()}))
    def start(self, config: dict[str, Any]) -> None:
        self.traffic = Traffic(**config)

    @rule(
        requests=st.lists(
            st.fixed_dictionaries({name: st.sampled_from(values) for name, values in REQUESTS.items()}),
            min_size=1,
            max_size=4,
        )
    )
    def send(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.traffic.send(**request)

    @rule(choice=st.integers(0, 5))
    def send_next_turn(self, choice: int) -> None:
        self.traffic.send_next_turn(choice)

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.traffic.step()

    @precondition(lambda self: self.traffic.engine.scheduler.requests)
    @rule(choice=st.integers(0, 20), step_runs=st.booleans())
    def abort(self, choice: int, step_runs: bool) -> None:
        if step_runs:
            self.traffic.abort_while_a_step_runs(choice)
        else:
            self.traffic.abort(choice)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.traffic.reset_prefix_cache()

    @invariant()
    def state_is_consistent(self) -> None:
        if hasattr(self, "traffic"):
            check_invariants(self.traffic.engine.scheduler)

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.finish()


TestTraffic = TrafficMachine.TestCase
TestTraffic.settings = settings(
    max_examples=100,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
