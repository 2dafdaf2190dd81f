"""From the batch to the arrays of one forward pass, by index arithmetic alone. R rows, T tokens of the step."""

from dataclasses import dataclass

import numpy as np

from vllm_clone.step import SchedulerOutput
from vllm_clone.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's rows and tokens; rows are in ascending batch order."""

    rows: np.ndarray
    """Batch rows that compute something, int64."""
    input_ids_T: np.ndarray
    """int64."""
    positions_T: np.ndarray
    """int64."""
    query_start_loc_R1: np.ndarray
    """int32; the tokens of row r are start[r] up to start[r + 1]."""
    seq_lens_R: np.ndarray
    """int32, tokens in the cache after the step."""
    slot_mappings: list[np.ndarray]
    """Per KV cache group int64 [T]."""
    block_tables: list[np.ndarray]
    """Per KV cache group int32 [R, B]."""
    max_query_len: int
    max_seq_len: int
    sampling: np.ndarray | None
    """Indices into the step's rows of those that sample, int64; None: every row, each with one token."""


def prepare(batch: InputBatch, step: SchedulerOutput) -> StepInputs:
    """Arrays for the tokens that ``step`` schedules; ``batch`` already has its news."""
    n = len(batch)
    if step.total_num_scheduled_tokens == n == len(step.running.req_ids):
        pending = batch.num_tokens[:n] - batch.num_computed[:n]
        if (pending == 1).all():
            return _prepare_decode(batch)
    return _prepare_mixed(batch, step)


def _prepare_decode(batch: InputBatch) -> StepInputs:
    """Every row of the batch computes its last token."""
    n = len(batch)
    row_R = np.arange(n)
    positions_R = batch.num_computed[:n].copy()
    max_seq_len = int(positions_R.max()) + 1
    return StepInputs(
        rows=row_R,
        input_ids_T=batch.last_token[:n].copy(),
        positions_T=positions_R,
        query_start_loc_R1=np.arange(n + 1, dtype=np.int32),
        seq_lens_R=(positions_R + 1).astype(np.int32),
        slot_mappings=[table.slots(row_R, positions_R) for table in batch.block_tables],
        block_tables=[table.gather(slice(n), max_seq_len) for table in batch.block_tables],
        max_query_len=1,
        max_seq_len=max_seq_len,
        sampling=None,
    )


def _prepare_mixed(batch: InputBatch, step: SchedulerOutput) -> StepInputs:
    """Any rows, each with any number of tokens."""
    rows = batch.rows_of(step.num_scheduled_tokens)
    counts = np.array(list(step.num_scheduled_tokens.values()), np.int64)
    order = rows.argsort()
    rows, counts = rows[order], counts[order]
    start_R1 = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=start_R1[1:])
    computed_R = batch.num_computed[rows]
    row_T = np.repeat(rows, counts)
    positions_T = np.arange(start_R1[-1]) + np.repeat(computed_R - start_R1[:-1], counts)
    seq_lens_R = computed_R + counts
    max_seq_len = int(seq_lens_R.max())

    decoding_R = batch.num_tokens[rows] - computed_R == 1
    input_ids_T = np.empty(len(positions_T), np.int64)
    input_ids_T[start_R1[:-1][decoding_R]] = batch.last_token[rows[decoding_R]]
    for i in np.flatnonzero(~decoding_R).tolist():
        tokens = batch.requests[rows[i]].tokens(computed_R[i], seq_lens_R[i])
        input_ids_T[start_R1[i] : start_R1[i + 1]] = tokens
    return StepInputs(
        rows=rows,
        input_ids_T=input_ids_T,
        positions_T=positions_T,
        query_start_loc_R1=start_R1.astype(np.int32),
        seq_lens_R=seq_lens_R.astype(np.int32),
        slot_mappings=[table.slots(row_T, positions_T) for table in batch.block_tables],
        block_tables=[table.gather(rows, max_seq_len) for table in batch.block_tables],
        max_query_len=int(counts.max()),
        max_seq_len=max_seq_len,
        sampling=np.flatnonzero(seq_lens_R == batch.num_tokens[rows]),
    )
