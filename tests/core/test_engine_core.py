"""EngineCore and its loop without processes."""

import queue
import threading

import pytest

from tests.engine.fakes import FakeExecutor, expected_ids, fake_config
from vllm_clone.config.kv_cache import FullAttentionSpec, SlidingWindowSpec, group_layers
from vllm_clone.core.engine_core import EngineCore, plan_kv_cache
from vllm_clone.core.engine_loop import EngineLoop
from vllm_clone.errors import ConfigError
from vllm_clone.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ShutdownRequest,
    StepCounts,
    UtilityCall,
)
from vllm_clone.sampling_params import SamplingParams

BLOCK_BYTES = 2 * 16 * 8 * 4


def request(request_id: str = "r", prompt: list[int] | None = None, client: int = 0, **params) -> EngineCoreRequest:
    resolved = SamplingParams(**{"max_tokens": 5, **params})
    return EngineCoreRequest(request_id, prompt or [97], resolved, arrival_time=0.0, client_index=client)


@pytest.fixture
def core() -> EngineCore:
    return EngineCore(fake_config(), FakeExecutor)


def run(core: EngineCore) -> dict[str, list]:
    outputs: dict[str, list] = {}
    while core.has_work:
        for batch in core.step().values():
            for output in batch.outputs:
                outputs.setdefault(output.request_id, []).append(output)
    return outputs


# ---- EngineCore ----


def test_tokens_come_one_per_step_and_the_last_says_why(core: EngineCore) -> None:
    core.add_request(request())
    outputs = run(core)["r"]
    assert [i for o in outputs for i in o.new_token_ids] == expected_ids([97], 5)
    assert [o.finish_reason for o in outputs] == [None] * 4 + [FinishReason.LENGTH]


def test_outputs_go_to_the_client_that_asked(core: EngineCore) -> None:
    core.add_request(request("a", client=0))
    core.add_request(request("b", client=2))
    by_client = core.step()
    assert {client: [o.request_id for o in batch.outputs] for client, batch in by_client.items()} == {
        0: ["a"],
        2: ["b"],
    }
    assert by_client[0].scheduler_stats is not None
    assert by_client[2].scheduler_stats is None


def test_the_last_state_told_is_an_idle_one(core: EngineCore) -> None:
    core.add_request(request())
    states = []
    while core.has_work:
        states.append(core.step()[0].scheduler_stats)
    assert states[-1].num_running == 0
    assert states[-1].kv_cache_usage == 0


def test_no_state_is_told_with_statistics_off() -> None:
    config = fake_config()
    config.observability_config.disable_log_stats = True
    core = EngineCore(config, FakeExecutor)
    core.add_request(request())
    assert core.step()[0].scheduler_stats is None


def test_an_abort_that_comes_during_a_forward_pass_is_the_end_of_the_request(core: EngineCore) -> None:
    core.add_request(request("a"))
    core.add_request(request("b"))
    execute = core.executor.execute_model

    def execute_and_abort(step):
        core.late_aborts.put(["a"])
        return execute(step)

    core.executor.execute_model = execute_and_abort  # type: ignore[method-assign]
    assert [o.request_id for o in core.step()[0].outputs] == ["b"]
    assert list(core.scheduler.requests) == ["b"]


def test_a_request_that_cannot_be_added_gets_an_error_and_the_others_go_on(core: EngineCore) -> None:
    failed = core.add_request(request("bad", prompt=[-5] * 16))
    assert failed is not None
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error
    core.add_request(request("good"))
    assert list(run(core)) == ["good"]


def test_a_second_request_of_the_same_id_does_not_disturb_the_first(core: EngineCore) -> None:
    core.add_request(request())
    assert core.add_request(request(prompt=[120])) is None
    assert [i for o in run(core)["r"] for i in o.new_token_ids] == expected_ids([97], 5)


def test_the_executor_is_shut_down_when_the_start_fails() -> None:
    executors: list[FakeExecutor] = []

    def factory(config):
        executors.append(FakeExecutor(config))
        return executors[0]

    with pytest.raises(ConfigError):
        EngineCore(fake_config(num_blocks=3), factory)
    assert executors[0].is_shut_down


@pytest.mark.parametrize("method", ["no_such", "step", "__init__", "shutdown"])
def test_only_named_utilities_can_be_called(core: EngineCore, method: str) -> None:
    with pytest.raises(ValueError, match="no utility"):
        core.call(method, [])


# ---- the size of the KV cache ----


def plan(available: int, *, max_model_len: int = 100, specs=None, **cache):
    config = fake_config(max_model_len=max_model_len)
    config.cache_config.num_gpu_blocks_override = cache.get("override")
    groups = group_layers(specs or {"layer": FullAttentionSpec(16, 1, 8, "float32")})
    return plan_kv_cache(config, groups, available)


def test_the_memory_is_divided_into_blocks() -> None:
    assert plan(BLOCK_BYTES * 40 + 17).num_blocks == 40


def test_the_override_counts_whatever_the_memory() -> None:
    assert plan(0, override=9).num_blocks == 9


def test_one_request_of_full_length_and_the_null_block_just_fit() -> None:
    assert plan(BLOCK_BYTES * 8, max_model_len=112).num_blocks == 8
    with pytest.raises(ConfigError, match=r"--max-model-len of at most 112\."):
        plan(BLOCK_BYTES * 8, max_model_len=113)


def test_a_length_left_to_the_engine_is_lowered_to_what_fits_but_not_to_nothing() -> None:
    config = fake_config(max_model_len=4096)
    config.cache_config.num_gpu_blocks_override = None
    config.model_config.fit_max_model_len = True
    groups = group_layers({"layer": FullAttentionSpec(16, 1, 8, "float32")})
    assert plan_kv_cache(config, groups, BLOCK_BYTES * 8).num_blocks == 8
    assert config.model_config.max_model_len == 7 * 16
    assert plan_kv_cache(config, groups, BLOCK_BYTES * 999).num_blocks == 999
    assert config.model_config.max_model_len == 7 * 16
    with pytest.raises(ConfigError):
        plan_kv_cache(config, groups, BLOCK_BYTES)


@pytest.mark.parametrize("available", [0, BLOCK_BYTES - 1, BLOCK_BYTES])
def test_a_cache_without_a_usable_block_says_so(available: int) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        plan(available)


def test_a_sliding_window_needs_less() -> None:
    window = {"layer": SlidingWindowSpec(16, 1, 8, "float32", sliding_window=32)}
    assert plan(BLOCK_BYTES * 64, max_model_len=4096, specs=window).num_blocks == 64
    with pytest.raises(ConfigError):
        plan(BLOCK_BYTES * 64, max_model_len=4096)


# ---- EngineLoop ----


class Harness:
    """A loop in a thread, and what it sends."""

    def __init__(self, core: EngineCore) -> None:
        self.sent: queue.SimpleQueue[tuple[int, EngineCoreOutputs]] = queue.SimpleQueue()
        self.loop = EngineLoop(core, lambda client, outputs: self.sent.put((client, outputs)))
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def next_output(self):
        while True:
            _, batch = self.sent.get(timeout=10)
            if batch.outputs:
                return batch.outputs[0]

    def next_result(self):
        while True:
            _, batch = self.sent.get(timeout=10)
            if batch.utility_result is not None:
                return batch.utility_result

    def join(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def harness(core: EngineCore):
    harness = Harness(core)
    yield harness
    harness.loop.put(ShutdownRequest())
    harness.join()


def test_an_abort_never_overtakes_its_request(harness: Harness, core: EngineCore) -> None:
    for _ in range(50):
        harness.loop.put(request("r", max_tokens=4000))
        harness.loop.put(AbortRequests(["r"]))
    harness.loop.put(UtilityCall(1, "get_state"))
    assert harness.next_result().result["running"] == 0


def test_utilities_are_answered_while_requests_run(harness: Harness) -> None:
    harness.loop.put(request(max_tokens=4000))
    harness.next_output()
    harness.loop.put(UtilityCall(1, "ping"))
    assert harness.next_result().result is True
    harness.loop.put(UtilityCall(2, "nonsense"))
    failed = harness.next_result()
    assert (failed.call_id, failed.result) == (2, None)
    assert "nonsense" in failed.error


def test_a_shutdown_answers_what_runs_and_what_still_comes(harness: Harness) -> None:
    harness.loop.put(request("running", max_tokens=4000))
    harness.next_output()
    harness.loop.put(ShutdownRequest(timeout=60))
    harness.loop.put(request("late"))
    harness.loop.put(UtilityCall(1, "get_state"))
    harness.loop.put(ShutdownRequest())
    harness.join()
    ended = {}
    while not harness.sent.empty():
        _, batch = harness.sent.get()
        if batch.utility_result is not None:
            assert "shutting down" in batch.utility_result.error
        ended.update({o.request_id: o.finish_reason for o in batch.outputs if o.finish_reason is not None})
    assert ended == {"running": FinishReason.ABORT, "late": FinishReason.ABORT}
    assert harness.error is None


def test_a_drain_ends_with_the_last_request(harness: Harness) -> None:
    harness.loop.put(request(max_tokens=20))
    harness.loop.put(ShutdownRequest(timeout=60))
    harness.join()
    reasons = []
    while not harness.sent.empty():
        reasons += [o.finish_reason for o in harness.sent.get()[1].outputs]
    assert reasons[-1] is FinishReason.LENGTH


def test_the_failure_of_a_helper_thread_ends_the_loop(harness: Harness) -> None:
    harness.loop.put(RuntimeError("the input thread failed"))
    harness.join()
    assert str(harness.error) == "the input thread failed"


def test_steps_are_told_apart_by_how_they_ran_when_asked_to() -> None:
    config = fake_config()
    config.observability_config.cudagraph_metrics = True
    core = EngineCore(config, FakeExecutor)
    execute = core.executor.execute_model

    def second_is_replayed(step):
        result = execute(step)
        result.replayed = step.num_scheduled_tokens.get("r") == 1
        return result

    core.executor.execute_model = second_is_replayed  # type: ignore[method-assign]
    core.add_request(request(prompt=[97, 98]))
    first, second = (core.step()[0].scheduler_stats for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.steps == StepCounts(direct=1, direct_tokens=2)
    assert second.steps == StepCounts(replayed=1, replayed_tokens=1)
