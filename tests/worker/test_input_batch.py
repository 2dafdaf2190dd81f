"""Preparation of a step, compared with what each row and token calls for, one by one."""

import numpy as np
import pytest

from vllm_clone.sampling_params import SamplingParams
from vllm_clone.step import NewRequest, RunningRequests, SchedulerOutput
from vllm_clone.worker.block_table import BlockTable
from vllm_clone.worker.input_batch import InputBatch
from vllm_clone.worker.step_inputs import prepare


def new(req_id, tokens, blocks, computed=0, num_prompt=None):
    params = SamplingParams(temperature=0)
    return NewRequest(req_id, list(tokens), num_prompt or len(tokens), params, (list(blocks),), computed)


def step(new_requests=(), running=(), counts=None, finished=()):
    """``running`` holds (req_id, new block ids or None, num computed)."""
    ids, blocks, computed = (list(c) for c in zip(*running, strict=True)) if running else ([], [], [])
    columns = RunningRequests(ids, [None if b is None else (b,) for b in blocks], computed)
    counts = counts or {}
    return SchedulerOutput(list(new_requests), columns, counts, sum(counts.values()), set(finished))


@pytest.fixture
def batch():
    return InputBatch(4, 100, [4], seed=0)


def test_a_mixed_step_lays_rows_out_in_batch_order(batch):
    batch.update(step([new("a", range(10, 16), [3, 5], computed=4), new("b", range(20, 29), [7, 2], computed=0)]))
    inputs = prepare(batch, step(counts={"b": 5, "a": 2}))
    assert inputs.input_ids_T.tolist() == [14, 15, 20, 21, 22, 23, 24]
    assert inputs.positions_T.tolist() == [4, 5, 0, 1, 2, 3, 4]
    assert inputs.query_start_loc_R1.tolist() == [0, 2, 7]
    assert inputs.seq_lens_R.tolist() == [6, 5]
    assert inputs.slot_mappings[0].tolist() == [20, 21, 28, 29, 30, 31, 8]
    assert inputs.block_tables[0].tolist() == [[3, 5], [7, 2]]
    assert (inputs.max_query_len, inputs.max_seq_len) == (5, 6)
    assert inputs.sampling.tolist() == [0]


def test_a_decode_step_computes_each_rows_last_token(batch):
    batch.update(step([new("a", [1, 2, 3], [3]), new("b", [4, 5, 6, 7], [6])]))
    batch.append_sampled(np.array([0, 1]), [50, 60])
    news = step(running=[("b", [9], 4), ("a", None, 3)], counts={"b": 1, "a": 1})
    batch.update(news)
    inputs = prepare(batch, news)
    assert inputs.sampling is None
    assert inputs.rows.tolist() == [0, 1]
    assert inputs.input_ids_T.tolist() == [50, 60]
    assert inputs.positions_T.tolist() == [3, 4]
    assert inputs.slot_mappings[0].tolist() == [15, 36]
    assert inputs.query_start_loc_R1.tolist() == [0, 1, 2]


def test_one_token_of_a_prefill_is_not_a_decode(batch):
    batch.update(step([new("a", [1, 2, 3], [3])]))
    news = step(running=[("a", None, 1)], counts={"a": 1})
    batch.update(news)
    inputs = prepare(batch, news)
    assert inputs.input_ids_T.tolist() == [2]
    assert inputs.sampling.tolist() == []


def test_a_resumed_request_keeps_prompt_and_outputs_apart(batch):
    batch.update(step([new("a", [1, 2, 3, 8, 9], [3, 4], num_prompt=3)]))
    state = batch.requests[0]
    assert state.prompt_ids.tolist() == [1, 2, 3]
    assert state.output_ids == [8, 9]
    assert state.tokens(1, 5).tolist() == [2, 3, 8, 9]
    assert state.tokens(3, 4).tolist() == [8]


def test_the_schedulers_lists_are_not_kept(batch):
    request = new("a", [1, 2, 3], [3])
    batch.update(step([request]))
    batch.append_sampled(np.array([0]), [7])
    assert request.token_ids == [1, 2, 3]


def test_memory_follows_use_not_the_limits():
    # A sequence of 10 million tokens and 1,000 rows would take 40 GB as one matrix of token ids.
    large = InputBatch(1000, 100, [16], seed=0)
    large.update(step([new("a", [1, 2, 3], [1])]))
    assert large.block_tables[0]._ids.nbytes < 1 << 20


class TestBlockTable:
    def test_rows_grow_beyond_the_first_width(self):
        table = BlockTable(2, 4)
        table.set(0, [1])
        for block in range(2, 60):
            table.append(0, [block])
        assert table.gather(slice(1), 59 * 4).tolist() == [list(range(1, 60))]

    def test_set_replaces_and_move_copies(self):
        table = BlockTable(2, 4)
        table.set(0, [1, 2, 3])
        table.set(0, [4])
        table.set(1, [5, 6])
        table.append(0, [7])
        assert table.gather(slice(2), 8).tolist() == [[4, 7], [5, 6]]
        table.move(1, 0)
        assert table.gather(np.array([0]), 8).tolist() == [[5, 6]]

    def test_a_gathered_table_is_contiguous_and_as_wide_as_needed(self):
        table = BlockTable(3, 4)
        table.set(1, [1, 2, 3])
        gathered = table.gather(np.array([1, 0]), 9)
        assert gathered.shape == (2, 3)
        assert gathered.flags.c_contiguous
        assert gathered.dtype == np.int32
