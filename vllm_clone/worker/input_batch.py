"""The batch that persists between steps: a structure of arrays that each step edits instead of rebuilding.

Rows 0 … n − 1 are the requests that hold KV blocks; when one leaves, the last row takes its place. A running
request need not be in every step. R rows of a step, T tokens of a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vllm_clone.sample import SamplingRows
from vllm_clone.sampling_params import SamplingParams
from vllm_clone.step import BlockIds, NewRequest, RunningRequests, SchedulerOutput
from vllm_clone.worker.block_table import BlockTable


@dataclass(slots=True)
class RequestState:
    """What the worker knows of one request besides its row's numbers."""

    req_id: str
    prompt_ids: np.ndarray
    """int64."""
    output_ids: list[int]
    """Grows with each sampled token; starts with the old outputs when the request resumes after preemption."""
    num_prompt_logprobs: int | None
    """Scores wanted per prompt position; None when none are, or none any more."""
    params: SamplingParams

    def tokens(self, start: int, end: int) -> np.ndarray:
        """Ids at positions ``start`` up to ``end``, int64."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        outputs = self.output_ids[max(start - num_prompt, 0) : end - num_prompt]
        return np.concatenate((self.prompt_ids[start:], np.array(outputs, np.int64)))


class InputBatch:
    """Requests by row. Memory follows the tokens that requests really have."""

    def __init__(self, max_num_seqs: int, vocab_size: int, block_sizes: Iterable[int], seed: int) -> None:
        """An empty batch.

        Args:
            max_num_seqs: most rows at once.
            vocab_size: tokens the model scores.
            block_sizes: tokens per block of each KV cache group.
            seed: of the seeds of requests that bring none.
        """
        self.requests: list[RequestState] = []
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        """Tokens whose keys and values are in the cache, by row."""
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        """Tokens known, prompt and outputs, by row."""
        self.last_token = np.zeros(max_num_seqs, np.int64)
        """Id at position ``num_tokens − 1``, by row."""
        self.block_tables = [BlockTable(max_num_seqs, size) for size in block_sizes]
        self.sampling = SamplingRows(max_num_seqs, vocab_size)
        self.has_prompt_logprobs = 0
        """Rows that still want scores of their prompt."""
        self._row_of: dict[str, int] = {}
        self._drawn_seeds: dict[str, int] = {}
        self._seed_source = np.random.default_rng(seed)
        self._running_ids: list[str] = []
        self._running_rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def rows_of(self, req_ids: Iterable[str]) -> np.ndarray:
        """Rows of known requests, int64."""
        row_of = self._row_of
        return np.array([row_of[req_id] for req_id in req_ids], np.int64)

    def update(self, step: SchedulerOutput) -> None:
        """Apply a step's news: drop what finished or was preempted, add new requests, advance running ones."""
        for req_id in step.preempted_req_ids:
            self._remove(req_id)
        for req_id in step.finished_req_ids:
            self._remove(req_id)
            self._drawn_seeds.pop(req_id, None)
        for new in step.new:
            self._add(new)
        if step.running.req_ids:
            self._advance(step.running)

    def append_sampled(self, rows: np.ndarray, token_ids: list[int]) -> list[str]:
        """Add each row's new token to its history; the rows' request ids."""
        self.last_token[rows] = token_ids
        self.num_tokens[rows] += 1
        req_ids = []
        for row, token in zip(rows.tolist(), token_ids, strict=True):
            request = self.requests[row]
            request.output_ids.append(token)
            req_ids.append(request.req_id)
        return req_ids

    def _advance(self, running: RunningRequests) -> None:
        if self._running_rows is None or running.req_ids != self._running_ids:
            self._running_ids, self._running_rows = running.req_ids.copy(), self.rows_of(running.req_ids)
        self.num_computed[self._running_rows] = running.num_computed_tokens
        for req_id, block_ids in zip(running.req_ids, running.new_block_ids, strict=True):
            if block_ids is not None:
                self._append_blocks(self._row_of[req_id], block_ids)

    def _append_blocks(self, row: int, block_ids: BlockIds) -> None:
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            if ids:
                table.append(row, ids)

    def _add(self, new: NewRequest) -> None:
        row = len(self.requests)
        ids = np.array(new.token_ids, np.int64)
        params, num_prompt = new.sampling_params, new.num_prompt_tokens
        state = RequestState(new.req_id, ids[:num_prompt], new.token_ids[num_prompt:], params.prompt_logprobs, params)
        if state.output_ids or num_prompt < 2:
            state.num_prompt_logprobs = None  # the prompt was scored before the preemption, or has nothing to score
        self.has_prompt_logprobs += state.num_prompt_logprobs is not None
        self.requests.append(state)
        self._row_of[new.req_id] = row
        self._running_rows = None
        self.num_computed[row] = new.num_computed_tokens
        self.num_tokens[row] = len(ids)
        self.last_token[row] = ids[-1]
        for table, blocks in zip(self.block_tables, new.block_ids, strict=True):
            table.set(row, blocks)
        self.sampling.add(params, self._seed(new), state.prompt_ids, state.output_ids)

    def _seed(self, new: NewRequest) -> int:
        """The request's own seed, or one drawn for it, which outlives a preemption."""
        if new.sampling_params.seed is not None:
            return new.sampling_params.seed
        if new.req_id not in self._drawn_seeds:
            self._drawn_seeds[new.req_id] = int(self._seed_source.integers(1 << 64, dtype=np.uint64))
        return self._drawn_seeds[new.req_id]

    def _remove(self, req_id: str) -> None:
        row = self._row_of.pop(req_id, None)
        if row is None:
            return  # it never ran, or was preempted before
        last = len(self.requests) - 1
        self.has_prompt_logprobs -= self.requests[row].num_prompt_logprobs is not None
        moved = self.requests.pop()
        if row != last:
            self.requests[row] = moved
            self._row_of[moved.req_id] = row
            for array in (self.num_computed, self.num_tokens, self.last_token):
                array[row] = array[last]
            for table in self.block_tables:
                table.move(last, row)
        self.sampling.remove(row)
        self._running_rows = None
