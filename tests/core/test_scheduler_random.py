"""Random traffic against small pools: nothing leaks, nothing is shared wrongly, every request ends, and every
output is what an unconstrained run gives."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.harness import EOS, Engine, check_invariants, core_request, expected_output, full, make_scheduler, sliding
from vllm_clone.messages import EngineCoreRequest, FinishReason, PrefillStats

SPECS = [
    [full()],
    [sliding(5)],
    [full(), sliding(6)],
    [full(), sliding(1), sliding(9)],
    [full(), sliding(8), sliding(8)],
    [full(), full()],
]

MAX_MODEL_LEN = 40


class Traffic(RuleBasedStateMachine):
    """Rules are what a client or the engine loop may do, in any order."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, EngineCoreRequest] = {}
        self.aborted: set[str] = set()

    @initialize(
        specs=st.sampled_from(SPECS),
        room=st.sampled_from([1.0, 1.2, 1.5, 2.5]),
        budget=st.sampled_from([4, 7, 16, 64]),
        max_num_seqs=st.sampled_from([3, 6, 6, 12]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.sampled_from([True, True, True, False]),
        chunked=st.sampled_from([True, True, False]),
        reserve_full=st.booleans(),
        long_prefill=st.sampled_from([0, 0, 3]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
    )
    def start(self, specs, room, budget, chunked, **options) -> None:  # type: ignore[no-untyped-def]
        """``room`` is the pool's size in full-length requests of full-attention groups."""
        budget = budget if chunked else MAX_MODEL_LEN
        num_blocks = 1 + int(room * len(specs) * MAX_MODEL_LEN // 4)
        self.engine = Engine(
            make_scheduler(
                *specs, num_blocks=num_blocks, budget=budget, chunked=chunked, max_model_len=MAX_MODEL_LEN, **options
            )
        )

    @rule(
        requests=st.lists(
            st.tuples(
                st.integers(0, 1),
                st.integers(0, 20),
                st.integers(1, 4),
                st.integers(8, 30),
                st.integers(0, 2),
                st.sampled_from([None, None, None, "a"]),
                st.sampled_from([None, None, None, 0]),
                st.booleans(),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def add(self, requests) -> None:  # type: ignore[no-untyped-def]
        for family, shared, own, max_tokens, priority, salt, prompt_logprobs, ignore_eos in requests:
            name = f"r{len(self.sent)}"
            prompt = [1000 * family + i for i in range(shared)] + [7000 + own for _ in range(own)]
            self._send(
                core_request(
                    name, prompt, max_tokens=max_tokens, priority=priority, salt=salt, ignore_eos=ignore_eos,
                    prompt_logprobs=prompt_logprobs, eos_token_id=EOS,
                )
            )  # fmt: skip

    @rule(family=st.integers(0, 5))
    def add_next_turn(self, family) -> None:  # type: ignore[no-untyped-def]
        """Continue a finished conversation: its prompt and answer start the new prompt."""
        done = [n for n, out in self.engine.last.items() if out.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]
        if not done:
            return
        turn = self.sent[done[family % len(done)]]
        prompt = turn.prompt_token_ids + self.engine.tokens[turn.request_id] + [9000]
        name = f"r{len(self.sent)}"
        self._send(core_request(name, prompt[: MAX_MODEL_LEN - 1], max_tokens=6, salt=turn.cache_salt))

    @rule(count=st.integers(1, 8))
    def steps(self, count) -> None:  # type: ignore[no-untyped-def]
        for _ in range(count):
            self._step()

    def _send(self, request: EngineCoreRequest) -> None:
        self.sent[request.request_id] = request
        self.engine.add(request)

    def _step(self) -> None:
        scheduler = self.engine.scheduler
        had_work = bool(scheduler.requests)
        step = scheduler.schedule()
        counts = step.num_scheduled_tokens
        assert step.total_num_scheduled_tokens == sum(counts.values()) <= scheduler.max_tokens_per_step
        assert all(count >= 1 for count in counts.values())
        assert all(new.num_computed_tokens < len(new.token_ids) for new in step.new)
        assert counts or step.preempted_req_ids or not had_work, "a step with work made no progress"
        self.engine.finish_step(step)

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(choice=st.integers(0, 100))
    def abort(self, choice) -> None:  # type: ignore[no-untyped-def]
        live = list(self.engine.scheduler.requests)
        name = live[choice % len(live)]
        ended = self.engine.scheduler.finish_requests([name, "unknown"])
        assert [r.request_id for r in ended] == [name]
        self.aborted.add(name)

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(choice=st.integers(0, 100))
    def abort_while_a_step_runs(self, choice) -> None:  # type: ignore[no-untyped-def]
        step = self.engine.scheduler.schedule()
        live = list(self.engine.scheduler.requests)
        name = live[choice % len(live)]
        result = self.engine.runner.execute(step)
        self.engine.scheduler.finish_requests([name])
        self.aborted.add(name)
        self.engine.runner.execute = lambda _: result  # type: ignore[method-assign]
        self.engine.finish_step(step)
        del self.engine.runner.execute

    @rule()
    def reset_prefix_cache(self) -> None:
        running = bool(self.engine.scheduler.running)
        assert self.engine.scheduler.reset_prefix_cache() is not running

    @invariant()
    def state_is_consistent(self) -> None:
        if hasattr(self, "engine"):
            check_invariants(self.engine.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        scheduler = self.engine.scheduler
        assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks - 1
        assert scheduler.reset_prefix_cache()
        assert not self.engine.runner.requests
        for name, request in self.sent.items():
            self._check_answer(name, request)

    def _check_answer(self, name: str, request: EngineCoreRequest) -> None:
        tokens, reason = expected_output(request, MAX_MODEL_LEN)
        got = self.engine.tokens.get(name, [])
        if name in self.aborted:
            assert got == tokens[: len(got)]
            return
        last = self.engine.last[name]
        assert (got, last.finish_reason) == (tokens, reason)
        first = self.engine.outputs[name][0]
        assert isinstance(first.prefill_stats, PrefillStats)
        assert first.prefill_stats.num_prompt_tokens == len(request.prompt_token_ids)
        if request.sampling_params.prompt_logprobs is not None:
            assert first.prompt_logprobs is not None
            assert [row[0] for row in first.prompt_logprobs.token_ids] == request.prompt_token_ids[1:]


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
