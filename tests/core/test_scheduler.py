"""One step at a time: order, budget, admission, preemption, what is sent to workers and told to clients."""

import pytest

from tests.core.harness import EOS, Engine, core_request, expected_output, full, make_scheduler, next_token, sliding
from vllm_clone.messages import EventType, FinishReason
from vllm_clone.step import ModelRunnerOutput


def engine(*specs, **options) -> Engine:  # type: ignore[no-untyped-def]
    return Engine(make_scheduler(*specs, **options))


def unique(start: int, count: int) -> list[int]:
    """A prompt that shares nothing with others of a different start."""
    return list(range(1000 * start, 1000 * start + count))


# ---- budget and order ----


def test_running_requests_come_first_and_prompts_take_what_is_left() -> None:
    run = engine(budget=8, caching=False)
    run.add(core_request("a", unique(1, 3), max_tokens=20))
    run.step()
    run.step()
    a = run.scheduler.requests["a"]
    assert (a.num_tokens, a.num_computed_tokens) == (5, 4)
    run.add(core_request("b", unique(2, 10)))
    run.add(core_request("c", unique(3, 6)))
    assert run.step().num_scheduled_tokens == {"a": 1, "b": 7}
    assert "b" not in run.tokens
    assert run.step().num_scheduled_tokens == {"a": 1, "b": 3, "c": 4}
    assert (len(run.tokens["b"]), "c" in run.tokens) == (1, False)
    assert run.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 2}
    assert len(run.tokens["c"]) == 1


def test_a_step_that_is_large_enough_takes_in_no_further_prompt() -> None:
    run = engine(budget=2048, max_model_len=2048, num_blocks=2000, caching=False, device="cpu")
    for i in range(4):
        run.add(core_request(f"r{i}", unique(i, 300)))
    assert run.step().num_scheduled_tokens == {"r0": 300, "r1": 300}
    assert run.step().num_scheduled_tokens == {"r0": 1, "r1": 1, "r2": 300, "r3": 300}
    run.add(core_request("long", unique(5, 1500)))
    assert run.step().num_scheduled_tokens["long"] == 1500


def test_no_more_requests_run_than_max_num_seqs() -> None:
    run = engine(max_num_seqs=2)
    for i in range(4):
        run.add(core_request(f"r{i}", unique(i, 3)))
    assert set(run.step().num_scheduled_tokens) == {"r0", "r1"}
    assert len(run.scheduler.waiting) == 2


def test_without_chunked_prefill_a_prompt_waits_for_a_budget_that_takes_it_whole() -> None:
    run = engine(budget=32, max_model_len=32, chunked=False)
    run.add(core_request("a", unique(1, 20)))
    run.add(core_request("b", unique(2, 13)))
    run.add(core_request("c", unique(3, 2)))
    assert run.step().num_scheduled_tokens == {"a": 20}  # c does not overtake b
    assert run.step().num_scheduled_tokens == {"a": 1, "b": 13, "c": 2}


def test_long_prefill_threshold_caps_a_request_among_others_only() -> None:
    run = engine(budget=64, long_prefill=5)
    run.add(core_request("a", unique(1, 12)))
    assert run.step().num_scheduled_tokens == {"a": 12}
    run.add(core_request("b", unique(2, 12)))
    assert run.step().num_scheduled_tokens == {"a": 1, "b": 5}


def test_the_long_prefill_threshold_needs_chunked_prefill() -> None:
    run = engine(budget=64, max_model_len=64, long_prefill=5, chunked=False)
    run.add(core_request("a", unique(1, 12)))
    run.add(core_request("b", unique(2, 12)))
    assert run.step().num_scheduled_tokens == {"a": 12, "b": 12}


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    run = engine(num_blocks=6)
    run.add(core_request("a", unique(1, 12), max_tokens=8))
    run.step()
    run.add(core_request("big", unique(2, 12)))
    run.add(core_request("small", unique(3, 2)))
    assert set(run.step().num_scheduled_tokens) == {"a"}


def test_the_watermark_applies_only_when_something_runs() -> None:
    run = engine(num_blocks=10, watermark=0.5)
    run.add(core_request("a", unique(1, 20)))
    run.add(core_request("b", unique(2, 3)))
    assert set(run.step().num_scheduled_tokens) == {"a"}


def test_reserving_the_full_prompt_prevents_admission_on_its_first_chunk() -> None:
    for reserve, admitted in ((True, {"a"}), (False, {"a", "b"})):
        run = engine(num_blocks=12, budget=16, reserve_full=reserve)
        run.add(core_request("a", unique(1, 12), max_tokens=2))
        run.add(core_request("b", unique(2, 36), max_tokens=2))
        assert set(run.step().num_scheduled_tokens) == admitted


# ---- prefix cache ----


def test_two_equal_prompts_share_blocks_in_one_step() -> None:
    run = engine()
    run.add(core_request("a", 9))
    run.add(core_request("b", 9))
    step = run.step()
    assert step.num_scheduled_tokens == {"a": 9, "b": 1}
    assert step.new[1].num_computed_tokens == 8
    assert step.new[0].block_ids[0][:2] == step.new[1].block_ids[0][:2]


def test_prefill_stats_come_with_the_first_output_only() -> None:
    run = engine()
    run.add(core_request("a", 9))
    run.run()
    run.add(core_request("b", 12))
    run.run()
    stats = run.outputs["a"][0].prefill_stats, run.outputs["b"][0].prefill_stats
    assert [(s.num_prompt_tokens, s.num_cached_tokens, s.num_created_cache_tokens) for s in stats if s] == [
        (9, 0, 8),
        (12, 8, 4),
    ]
    assert all(output.prefill_stats is None for output in run.outputs["a"][1:])


def test_prefix_cache_counts_are_taken_at_admission() -> None:
    run = engine()
    run.add(core_request("a", 9))
    run.add(core_request("b", 9))
    run.add(core_request("scored", 9, prompt_logprobs=0))
    run.step()
    stats = run.scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 8)
    again = run.scheduler.make_stats()
    assert (again.prefix_cache_queries, again.prefix_cache_hits) == (0, 0)


def test_prefix_cache_cannot_be_reset_while_a_request_runs() -> None:
    run = engine()
    run.add(core_request("a", 9))
    run.step()
    assert not run.scheduler.reset_prefix_cache()
    run.run()
    assert run.scheduler.reset_prefix_cache()
    run.add(core_request("b", 9))
    assert run.step().new[0].num_computed_tokens == 0


# ---- preemption ----


def test_fcfs_preempts_the_latest_which_resumes_first_with_the_same_result() -> None:
    run = engine(num_blocks=7, max_model_len=24, max_num_seqs=2)  # room for 24 tokens, 1.5 requests at their half
    requests = [core_request(name, unique(i, 8), max_tokens=16) for i, name in enumerate(("first", "second", "third"))]
    for request in requests:
        run.add(request)
    step = run.step()
    while not step.preempted_req_ids:
        step = run.step()
    assert step.preempted_req_ids == {"second"}
    assert not step.new
    assert [r.request_id for r in run.scheduler.waiting] == ["second", "third"]
    kept = list(run.tokens["second"])
    assert kept
    while not step.new:
        step = run.step()
    resumed = step.new[0]
    assert resumed.req_id == "second"
    assert resumed.token_ids == [*requests[1].prompt_token_ids, *kept]
    assert resumed.num_prompt_tokens == 8
    run.run()
    for request in requests:
        assert run.tokens[request.request_id] == expected_output(request, 24)[0]
    assert run.last["second"].num_preemptions >= 1
    types = [event.type for output in run.outputs["second"] for event in output.events]
    assert types[:4] == [EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED, EventType.SCHEDULED]


def test_priority_preempts_the_least_urgent_and_waits_in_order() -> None:
    run = engine(num_blocks=7, max_model_len=24, policy="priority")
    run.add(core_request("low", unique(1, 8), max_tokens=16, priority=5))
    run.step()
    run.add(core_request("high", unique(2, 8), max_tokens=16, priority=1))
    run.add(core_request("later", unique(3, 8), max_tokens=16, priority=3))
    step = run.step()
    while not step.preempted_req_ids:
        step = run.step()
    assert step.preempted_req_ids == {"low"}
    assert [r.request_id for r in run.scheduler.waiting] == ["later", "low"]
    run.run()
    assert all(last.finish_reason is FinishReason.LENGTH for last in run.last.values())


def test_a_victim_already_scheduled_in_the_step_gives_everything_back() -> None:
    # low prefills its second chunk, then a decoding request needs the block that low has just been given
    run = engine(num_blocks=9, max_model_len=32, budget=13, policy="priority", reserve_full=False)
    run.add(core_request("low", unique(1, 28), max_tokens=4, priority=9))
    low = run.scheduler.requests["low"]
    assert run.step().num_scheduled_tokens == {"low": 13}
    run.add(core_request("high", unique(2, 4), max_tokens=12, priority=0))
    step = run.step()
    while not step.preempted_req_ids:
        assert low.status.name == "RUNNING"
        step = run.step()
    assert step.preempted_req_ids == {"low"}
    assert step.num_scheduled_tokens == {"high": 1}
    assert step.running.req_ids == ["high"]
    run.run()  # the played model checks that no unwritten block is reused
    assert run.tokens["low"] == [next_token("low", 28 + i) for i in range(4)]


def test_after_a_victim_before_them_the_others_are_served_with_its_budget() -> None:
    run = engine(num_blocks=11, max_model_len=48, budget=6, long_prefill=3, policy="priority", reserve_full=False)
    run.add(core_request("low", unique(1, 30), priority=9))
    run.step()
    run.add(core_request("high", unique(2, 5), priority=0, max_tokens=9))
    run.add(core_request("mid", unique(3, 30), priority=1))
    for _ in range(5):
        step = run.step()
    assert step.num_scheduled_tokens == {"low": 3, "high": 1, "mid": 2}
    step = run.step()
    assert step.preempted_req_ids == {"low"}
    assert step.num_scheduled_tokens == {"high": 1, "mid": 3}


def test_a_request_preempted_by_its_own_need_does_not_stop_the_others() -> None:
    run = engine(num_blocks=7, max_model_len=24, policy="priority")
    run.add(core_request("low", unique(1, 8), max_tokens=16, priority=5))
    run.add(core_request("high", unique(2, 8), max_tokens=16, priority=1))
    step = run.step()
    while not step.preempted_req_ids:
        step = run.step()
    assert step.preempted_req_ids == {"low"}
    assert set(step.num_scheduled_tokens) == {"high"}


def test_preemptions_are_counted_in_the_stats() -> None:
    run = engine(num_blocks=7, max_model_len=24)
    for i in range(2):
        run.add(core_request(f"r{i}", unique(i, 8), max_tokens=16))
    total = 0
    while run.scheduler.has_work:
        run.step()
        total += run.scheduler.make_stats().num_preemptions
    assert total >= 1
    assert total == sum(output.num_preemptions for output in run.last.values())


# ---- what may never run ----


@pytest.mark.parametrize(
    ("request_options", "engine_options", "message"),
    [
        ({"prompt": 30}, {"num_blocks": 6}, "KV cache blocks"),
        ({"prompt": 8, "max_tokens": 30}, {"num_blocks": 6}, "KV cache blocks"),
        ({"prompt": []}, {}, "at least 1"),
        ({"prompt": 64}, {"max_model_len": 64}, "fewer than 64"),
        ({"prompt": 60}, {"chunked": False, "budget": 50}, "without chunked prefill"),
    ],
)
def test_a_request_that_can_never_run_is_answered_with_the_reason(request_options, engine_options, message) -> None:  # type: ignore[no-untyped-def]
    run = engine(**engine_options)
    run.add(core_request("bad", **request_options))
    run.add(core_request("good", 3))
    assert run.scheduler.has_work
    run.run()
    assert run.last["bad"].finish_reason is FinishReason.ERROR
    assert message in str(run.last["bad"].error)
    assert run.last["good"].finish_reason is FinishReason.LENGTH


def test_a_request_that_just_fits_runs() -> None:
    run = engine(num_blocks=6, max_model_len=64)
    run.add(core_request("a", 12, max_tokens=9))  # 20 slots: the last token's keys are never needed
    run.run()
    assert len(run.tokens["a"]) == 9


def test_a_prompt_one_short_of_the_model_length_gives_one_token() -> None:
    run = engine(max_model_len=16)
    run.add(core_request("a", 15, max_tokens=100))
    run.run()
    assert len(run.tokens["a"]) == 1
    assert run.last["a"].finish_reason is FinishReason.LENGTH


# ---- ends ----


def test_a_stop_frees_the_request_and_tells_workers_in_the_next_step() -> None:
    run = engine()
    run.add(core_request("a", 9, max_tokens=1))
    run.step()
    assert run.last["a"].finish_reason is FinishReason.LENGTH
    assert not run.scheduler.requests
    assert run.scheduler.has_work, "the workers are still to be told"
    step = run.step()
    assert (step.finished_req_ids, step.total_num_scheduled_tokens) == ({"a"}, 0)
    assert not run.scheduler.has_work


def test_several_tokens_of_one_step_are_cut_after_the_stop() -> None:
    run = engine()
    run.add(core_request("a", 9, max_tokens=10, eos_token_id=EOS))
    step = run.scheduler.schedule()
    result = ModelRunnerOutput({"a": [5, EOS, 6]})
    outputs = run.scheduler.update_from_output(step, result)
    assert outputs[0].outputs[0].new_token_ids == [5, EOS]


def test_aborts_work_in_every_state_and_say_nothing() -> None:
    run = engine(num_blocks=7, max_model_len=24)
    for i in range(3):
        run.add(core_request(f"r{i}", unique(i, 8), max_tokens=16))
    step = run.step()
    while not step.preempted_req_ids:
        step = run.step()
    told = {name: len(outputs) for name, outputs in run.outputs.items()}
    ended = run.scheduler.finish_requests(["r0", "r1", "r2", "nobody"])  # running, preempted, waiting
    assert [r.request_id for r in ended] == ["r0", "r1", "r2"]
    assert run.scheduler.finish_requests(["r0"]) == []
    assert run.scheduler.kv.pool.num_free == 6
    run.run()
    assert {name: len(outputs) for name, outputs in run.outputs.items()} == told


def test_an_abort_while_the_step_runs_drops_its_token() -> None:
    run = engine()
    run.add(core_request("a", 9))
    step = run.scheduler.schedule()
    result = run.runner.execute(step)
    run.scheduler.finish_requests(["a"])
    assert run.scheduler.update_from_output(step, result) == {}


def test_abort_all_answers_every_client() -> None:
    run = engine(max_num_seqs=1)
    run.add(core_request("a", 9, client=0))
    run.add(core_request("b", 9, client=1))
    run.step()
    run.scheduler.abort_all()
    outputs = run.scheduler.update_from_output(run.scheduler.schedule(), ModelRunnerOutput({}))
    assert {c: [(o.request_id, o.finish_reason) for o in outs.outputs] for c, outs in outputs.items()} == {
        0: [("a", FinishReason.ABORT)],
        1: [("b", FinishReason.ABORT)],
    }


def test_one_request_can_fail_alone() -> None:
    run = engine()
    run.add(core_request("bad", 9, max_tokens=5))
    run.add(core_request("good", 9, max_tokens=5))
    run.step()
    run.scheduler.fail_request(run.scheduler.requests["bad"], "its grammar does not compile")
    run.run()
    assert (run.last["bad"].finish_reason, run.last["bad"].error) == (
        FinishReason.ERROR,
        "its grammar does not compile",
    )
    assert len(run.tokens["good"]) == 5


def test_an_id_in_use_is_refused() -> None:
    run = engine()
    run.add(core_request("a", 9))
    with pytest.raises(ValueError, match="'a' is in use"):
        run.scheduler.add_request(core_request("a", 9))


# ---- outputs ----


def test_outputs_go_to_the_client_that_asked() -> None:
    run = engine()
    run.add(core_request("a", unique(1, 3), client=0))
    run.add(core_request("b", unique(2, 3), client=2))
    step = run.scheduler.schedule()
    outputs = run.scheduler.update_from_output(step, run.runner.execute(step))
    assert {c: [o.request_id for o in outs.outputs] for c, outs in outputs.items()} == {0: ["a"], 2: ["b"]}
    assert all(outs.timestamp > 0 for outs in outputs.values())


def test_a_chunk_of_a_prompt_says_nothing() -> None:
    run = engine(budget=4)
    run.add(core_request("a", 9))
    run.step()
    run.step()
    assert not run.outputs
    run.step()
    assert len(run.outputs["a"]) == 1


@pytest.mark.parametrize("budget", [1, 2, 4, 7, 64])
def test_prompt_logprobs_do_not_depend_on_chunks_and_come_once(budget: int) -> None:
    run = engine(budget=budget, max_num_seqs=1)
    run.add(core_request("a", unique(1, 9), prompt_logprobs=0))
    run.run()
    first, *later = run.outputs["a"]
    assert first.prompt_logprobs is not None
    assert [row[0] for row in first.prompt_logprobs.token_ids] == unique(1, 9)[1:]
    assert len(first.prompt_logprobs.logprobs) == len(first.prompt_logprobs.ranks) == 8
    assert all(output.prompt_logprobs is None for output in later)


def test_prompt_logprobs_of_one_token_are_an_empty_list() -> None:
    run = engine()
    run.add(core_request("a", 1, prompt_logprobs=0))
    run.run()
    first = run.outputs["a"][0].prompt_logprobs
    assert first is not None
    assert first.token_ids == []


def test_events_carry_the_engine_clock_in_order() -> None:
    run = engine()
    run.add(core_request("a", 9))
    run.run()
    events = run.outputs["a"][0].events
    assert [event.type for event in events] == [EventType.QUEUED, EventType.SCHEDULED]
    assert events[0].timestamp < events[1].timestamp


def test_stats_show_queues_and_cache_usage() -> None:
    run = engine(max_num_seqs=1, num_blocks=11)
    run.add(core_request("a", unique(1, 9)))
    run.add(core_request("b", unique(2, 9)))
    run.step()
    stats = run.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.kv_cache_usage == pytest.approx(0.3)


# ---- sliding windows ----


def test_long_sequences_run_in_a_pool_that_only_holds_the_window() -> None:
    run = engine(sliding(8), num_blocks=1 + 5, budget=8, max_model_len=200)
    request = core_request("a", unique(1, 100), max_tokens=50, ignore_eos=True)
    run.add(request)
    run.run()
    assert run.tokens["a"] == expected_output(request, 200)[0]


def test_hybrid_outputs_equal_with_and_without_prefix_hits() -> None:
    run = engine(full(), sliding(6))
    first = core_request("a", 22, max_tokens=9)
    second = core_request("b", 22, max_tokens=9)
    run.add(first)
    run.run()
    run.add(second)
    assert run.step().new[0].num_computed_tokens == 20
    run.run()
    assert run.tokens["a"] == expected_output(first, 256)[0]
    assert run.tokens["b"] == expected_output(second, 256)[0]
