import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.sample import reference
from tests.worker.fakes import VOCAB, Driver, check, next_logits
from vllm_clone.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1, seed=3),
    SamplingParams(temperature=0.7, seed=4, top_k=5),
    SamplingParams(temperature=1.5, seed=5, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(temperature=1, seed=6, presence_penalty=2.0, logit_bias={3: 4.0, 9: -100.0}),
    SamplingParams(temperature=0, min_tokens=3, stop_set=list(range(40))),
    SamplingParams(temperature=1, seed=7, allowed_token_ids=[1, 2, 3], bad_words_token_ids=[[1], [2, 3]]),
    SamplingParams(temperature=0, logprobs=2),
]


def run(prompts, params, steps, **driver):
    d = Driver(**driver)
    for req_id, prompt in prompts.items():
        d.add(req_id, prompt, params)
    for counts in steps:
        d.step(counts)
    return d


def test_greedy_decoding_follows_the_model():
    d = run({"a": [1, 2, 3]}, GREEDY, [None] * 20)
    assert len(d.sequences["a"].outputs) == 20
    check(d.sequences["a"])


@pytest.mark.parametrize("params", PARAMS)
def test_every_feature_gives_the_tokens_of_the_definition(params):
    d = run({"a": [1, 2, 3], "b": [4] * 9}, params, [None] * 15)
    check(d.sequences["a"])
    check(d.sequences["b"])


def test_rows_with_different_features_share_a_step():
    d = Driver(max_num_seqs=16)
    for i, params in enumerate(PARAMS):
        d.add(str(i), range(i, 2 * i + 2), params)
    for _ in range(10):
        d.step()
    for sequence in d.sequences.values():
        check(sequence)


def test_a_request_in_mid_prefill_gets_no_token():
    d = Driver()
    d.add("a", range(20))
    assert d.step({"a": 7}).sampled_token_ids == {}
    assert d.step({"a": 7}).sampled_token_ids == {}
    assert d.model.num_logits_rows == 0
    assert list(d.step({"a": 6}).sampled_token_ids) == ["a"]
    check(d.sequences["a"])


@pytest.mark.parametrize("sizes", [[20], [1] * 20, [3, 4, 5, 8], [19, 1]])
def test_chunk_sizes_do_not_change_the_answer(sizes):
    d = run({"a": range(20)}, SamplingParams(temperature=1, seed=1), [{"a": n} for n in sizes] + [None] * 5)
    check(d.sequences["a"])


def test_logits_are_made_for_sampling_rows_only():
    d = Driver()
    d.add("a", range(10))
    d.add("b", range(30))
    d.step({"a": 10, "b": 11})
    assert d.model.num_logits_rows == 1


def test_a_running_request_may_sit_out_steps():
    d = Driver()
    for req_id in "abc":
        d.add(req_id, [ord(req_id) % VOCAB] * 5)
    d.step()
    for counts in ({"b": 1}, {"a": 1, "c": 1}, {"c": 1}, {"c": 1, "b": 1, "a": 1}, None):
        d.step(counts)
    for sequence in d.sequences.values():
        check(sequence)


def test_a_preempted_request_continues_where_it_was():
    params = SamplingParams(temperature=1, seed=11, frequency_penalty=1.0, min_tokens=6, stop_set=[1, 2])
    d = run({"a": range(9), "b": range(5)}, params, [None] * 4)
    d.preempt("a")
    d.step({"b": 1})
    d.step({"a": 6, "b": 1})
    d.step({"a": d.sequences["a"].pending, "b": 1})
    d.step()
    assert len(d.sequences["a"].outputs) == 6
    check(d.sequences["a"])
    check(d.sequences["b"])


def test_an_unseeded_request_keeps_its_noise_over_a_preemption():
    answers = []
    for interrupted in (False, True):
        d = run({"a": range(9)}, SamplingParams(temperature=2), [None] * 3)
        if interrupted:
            d.preempt("a")
        for _ in range(6):
            d.step()
        answers.append(d.sequences["a"].tokens)
    assert answers[0] == answers[1]


def test_unseeded_requests_draw_different_tokens():
    d = run({str(i): [1, 2, 3] for i in range(8)}, SamplingParams(temperature=2), [None] * 8)
    assert len({tuple(s.outputs) for s in d.sequences.values()}) == 8


def test_the_seed_alone_decides_so_children_equal_single_requests():
    together = run({"a": [1, 2], "b": [1, 2], "c": [1, 2]}, None, [])
    for i, req_id in enumerate("abc"):
        together.sequences[req_id].params = SamplingParams(temperature=1, seed=7 + i)
    for _ in range(6):
        together.step()
    for i, req_id in enumerate("abc"):
        alone = run({"x": [1, 2]}, SamplingParams(temperature=1, seed=7 + i), [None] * 6)
        assert alone.sequences["x"].tokens == together.sequences[req_id].tokens


def test_finished_requests_leave_and_others_keep_their_state():
    d = Driver()
    for i, params in enumerate(PARAMS[:7]):
        d.add(str(i), [i, i + 1, i + 2], params)
    for leaving in ("0", "6", "3", "1"):
        d.step()
        d.finish(leaving)
    d.add("new", [9, 9, 9])
    for _ in range(4):
        d.step()
    assert len(d.runner.batch) == 4
    for sequence in d.sequences.values():
        check(sequence)


def test_a_row_that_sat_out_may_leave_while_the_same_others_go_on():
    d = Driver()
    for req_id in "abc":
        d.add(req_id, [ord(req_id) % VOCAB] * 5)
    d.step()
    d.step({"b": 1, "c": 1})
    d.finish("a")
    d.step({"b": 1, "c": 1})
    d.step()
    check(d.sequences["b"])
    check(d.sequences["c"])


def test_finished_ids_that_the_worker_never_saw_are_ignored():
    d = run({"a": [1]}, GREEDY, [None])
    d.finished = {"stranger"}
    d.step()
    check(d.sequences["a"])


def test_a_step_without_tokens_only_delivers_news():
    d = run({"a": [1]}, GREEDY, [None])
    d.finish("a")
    assert d.step({}).sampled_token_ids == {}
    assert len(d.runner.batch) == 0


def test_history_longer_than_the_first_block_table_width():
    d = run({"a": [n % VOCAB for n in range(150)], "b": [5]}, GREEDY, [None] * 40)
    check(d.sequences["a"])
    check(d.sequences["b"])


def test_warm_up_leaves_no_trace():
    d = Driver()
    d.runner.warm_up()
    assert len(d.runner.batch) == 0
    d.add("a", [1, 2, 3])
    for _ in range(5):
        d.step()
    check(d.sequences["a"])


def test_large_batches_are_sampled_in_slices(monkeypatch):
    monkeypatch.setattr("vllm_clone.worker.model_runner._LOGITS_BYTES", 4 * VOCAB * 4)
    d = Driver(max_num_seqs=16)
    for i, params in enumerate(PARAMS):
        d.add(str(i), range(i, 2 * i + 2), params)
    for n in range(10):
        output = d.step({req_id: s.pending for req_id, s in d.sequences.items() if n != 4 or req_id != "3"})
        assert list(output.logprobs) == ["8"]
    for sequence in d.sequences.values():
        check(sequence)


class TestLogprobs:
    def test_only_requests_that_ask_get_them(self):
        d = Driver()
        d.add("a", [1, 2], GREEDY)
        d.add("b", [1, 2, 3], SamplingParams(temperature=0, logprobs=2))
        output = d.step()
        assert list(output.logprobs) == ["b"]
        rows = output.logprobs["b"]
        scores = reference.log_softmax(next_logits([1, 2, 3]).tolist())
        best = sorted(range(VOCAB), key=lambda v: -scores[v])[:2]
        assert rows.token_ids == [[best[0], *best]]
        assert rows.logprobs[0] == pytest.approx([scores[v] for v in [best[0], *best]], abs=1e-5)
        assert rows.ranks == [1]


class TestPromptLogprobs:
    PROMPT = [n * 7 % VOCAB for n in range(23)]

    def collect(self, d, steps):
        rows = []
        for counts in steps:
            part = d.step(counts).prompt_logprobs.get("a")
            if part is not None:
                rows += zip(part.token_ids, part.logprobs, part.ranks, strict=True)
        return rows

    @pytest.mark.parametrize("sizes", [[23], [1] * 23, [5, 17, 1], [22, 1]])
    def test_scores_equal_the_full_forward_for_any_chunks(self, sizes):
        d = Driver()
        d.add("a", self.PROMPT, SamplingParams(temperature=0, prompt_logprobs=3))
        d.add("b", [1, 2])
        rows = self.collect(d, [{"a": n, "b": 1} for n in sizes])
        assert len(rows) == len(self.PROMPT) - 1
        for i, (ids, values, rank) in enumerate(rows):
            scores = reference.log_softmax(next_logits(self.PROMPT[: i + 1]).tolist())
            target = self.PROMPT[i + 1]
            best = sorted(range(VOCAB), key=lambda v: -scores[v])[:3]
            assert ids == [target, *best]
            assert values == pytest.approx([scores[v] for v in ids], abs=1e-5)
            assert rank == sum(x >= scores[target] for x in scores)

    def test_zero_reports_the_prompt_tokens_alone(self):
        d = Driver()
        d.add("a", self.PROMPT, SamplingParams(temperature=0, prompt_logprobs=0))
        assert [len(ids) for ids, _, _ in self.collect(d, [None])] == [1] * 22

    def test_minus_one_reports_the_vocabulary(self):
        d = Driver()
        d.add("a", self.PROMPT[:3], SamplingParams(temperature=0, prompt_logprobs=-1))
        assert [len(ids) for ids, _, _ in self.collect(d, [None])] == [VOCAB + 1] * 2

    def test_a_single_token_has_nothing_to_score(self):
        d = Driver()
        d.add("a", [4], SamplingParams(temperature=0, prompt_logprobs=1))
        assert self.collect(d, [None, None]) == []

    def test_they_are_not_computed_again_after_a_preemption_past_the_prompt(self):
        d = Driver()
        d.add("a", self.PROMPT, SamplingParams(temperature=0, prompt_logprobs=1))
        assert len(self.collect(d, [None, None])) == 22
        d.preempt("a")
        assert self.collect(d, [None, None]) == []
        check(d.sequences["a"])

    def test_they_start_over_after_a_preemption_within_the_prompt(self):
        d = Driver()
        d.add("a", self.PROMPT, SamplingParams(temperature=0, prompt_logprobs=1))
        assert len(self.collect(d, [{"a": 10}])) == 10
        d.preempt("a")
        assert len(self.collect(d, [{"a": 10}, {"a": 13}])) == 22

    def test_decoding_after_them_is_lean_again(self):
        d = Driver()
        d.add("a", self.PROMPT, SamplingParams(temperature=0, prompt_logprobs=1))
        d.step()
        assert d.runner.batch.has_prompt_logprobs == 0
        d.finish("a")
        d.step({})
        assert d.runner.batch.has_prompt_logprobs == 0

    def test_long_prompts_are_scored_in_slices(self, monkeypatch):
        monkeypatch.setattr("vllm_clone.worker.model_runner._LOGITS_BYTES", 4 * VOCAB * 5)
        d = Driver()
        d.add("a", self.PROMPT, SamplingParams(temperature=0, prompt_logprobs=0))
        rows = self.collect(d, [None])
        assert [ids[0] for ids, _, _ in rows] == self.PROMPT[1:]
        assert all(math.isfinite(values[0]) for _, values, _ in rows)


class AnySchedule(RuleBasedStateMachine):
    """Whatever is added, chunked, skipped, preempted or aborted, each request's tokens are the definition's."""

    def __init__(self):
        super().__init__()
        self.driver = Driver(max_num_seqs=5, num_blocks=600)
        self.count = 0

    @property
    def ids(self):
        return list(self.driver.sequences)

    @rule(length=st.integers(1, 30), first=st.integers(0, VOCAB - 1), params=st.sampled_from(PARAMS))
    def add(self, length, first, params):
        if len(self.ids) < 5:
            self.driver.add(f"r{self.count}", [(first + n * n) % VOCAB for n in range(length)], params)
            self.count += 1

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def step_some(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.ids), unique=True, min_size=1))
        pending = {req_id: self.driver.sequences[req_id].pending for req_id in chosen}
        self.driver.step({req_id: data.draw(st.integers(1, n)) for req_id, n in pending.items()})

    @precondition(lambda self: self.ids)
    @rule(times=st.integers(1, 4))
    def step_all(self, times):
        for _ in range(times):
            if all(len(s.tokens) < 150 for s in self.driver.sequences.values()):
                self.driver.step()

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def preempt(self, data):
        self.driver.preempt(data.draw(st.sampled_from(self.ids)))

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def finish(self, data):
        req_id = data.draw(st.sampled_from(self.ids))
        check(self.driver.sequences[req_id])
        self.driver.finish(req_id)

    @invariant()
    def the_batch_is_what_the_scheduler_believes(self):
        if self.driver.finished or self.driver.preempted:
            return  # news not delivered yet
        batch = self.driver.runner.batch
        present = {s.req_id: row for row, s in enumerate(batch.requests)}
        assert set(present) == {req_id for req_id, s in self.driver.sequences.items() if s.in_batch}
        for req_id, row in present.items():
            sequence = self.driver.sequences[req_id]
            assert batch.requests[row].tokens(0, len(sequence.tokens)).tolist() == sequence.tokens
            assert batch.num_tokens[row] == len(sequence.tokens)
            assert batch.last_token[row] == sequence.tokens[-1]

    def teardown(self):
        for sequence in self.driver.sequences.values():
            check(sequence)


AnySchedule.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnySchedule = AnySchedule.TestCase
