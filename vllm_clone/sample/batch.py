"""Sampling state of the batch: one array per parameter, one small dict per rare feature.

``SamplingRows`` persists between steps and changes when rows come, go or move. ``SamplingBatch`` is what one
step's sampler gets: the same state for the rows that sample in that step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_clone.sample.adjust import Bitmask, Penalised, RowIds, banned_endings
from vllm_clone.sample.logprobs import LogprobWish
from vllm_clone.sample.token_counts import TokenCounts
from vllm_clone.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingBatch:
    """R logits rows. Arrays are per row; None means that no row uses the parameter. ``row`` fields count from 0."""

    num_rows: int
    temperature_R: np.ndarray | None = None
    """float32, 0 marks a greedy row; None: every row is greedy, and all other arrays are None too."""
    top_k_R: np.ndarray | None = None
    """int64, 0 = off."""
    top_p_R: np.ndarray | None = None
    """float32, 1 = off."""
    min_p_R: np.ndarray | None = None
    """float32, 0 = off."""
    seeds_R: np.ndarray | None = None
    """uint64."""
    positions_R: np.ndarray | None = None
    """int64, position of the input token whose successor is drawn."""
    bitmask: Bitmask | None = None
    allowed: list[RowIds] = field(default_factory=list)
    bias: list[RowIds] = field(default_factory=list)
    bias_values: list[np.ndarray] = field(default_factory=list)
    """float32, parallel to ``bias``."""
    min_tokens: list[RowIds] = field(default_factory=list)
    penalised: list[Penalised] = field(default_factory=list)
    bad_words: list[RowIds] = field(default_factory=list)
    logprobs: list[LogprobWish] = field(default_factory=list)
    custom: Callable[[torch.Tensor], None] | None = None
    """Processors of the user's own; change the logits in place."""

    @property
    def has_edits(self) -> bool:
        """Whether rows change the logits beyond their grammar's mask, which counts as the model's own."""
        return bool(self.allowed or self.bias or self.min_tokens or self.penalised or self.bad_words or self.custom)


@dataclass(frozen=True, slots=True)
class _Penalties:
    counts: TokenCounts
    repetition: float
    frequency: float
    presence: float


class SamplingRows:
    """Sampling parameters by batch row. Rows are dense: 0 … n − 1, and only the last may be moved into a hole."""

    def __init__(self, capacity: int, vocab_size: int) -> None:
        """Room for ``capacity`` rows of logits that are ``vocab_size`` wide."""
        self._vocab_size = vocab_size
        self._temperature = np.zeros(capacity, np.float32)
        self._top_k = np.zeros(capacity, np.int64)
        self._top_p = np.ones(capacity, np.float32)
        self._min_p = np.zeros(capacity, np.float32)
        self._seeds = np.zeros(capacity, np.uint64)
        self._outputs: list[list[int]] = []
        # Rows that use a feature; an empty one costs a truth test per step.
        self._random: set[int] = set()
        self._with_k: set[int] = set()
        self._with_p: set[int] = set()
        self._with_min_p: set[int] = set()
        self._allowed: dict[int, np.ndarray] = {}
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._min_tokens: dict[int, tuple[int, np.ndarray]] = {}
        self._penalties: dict[int, _Penalties] = {}
        self._bad_words: dict[int, list[list[int]]] = {}
        self._logprobs: dict[int, tuple[int, list[int] | None]] = {}
        self._arrays = (self._temperature, self._top_k, self._top_p, self._min_p, self._seeds)
        self._sets = (self._random, self._with_k, self._with_p, self._with_min_p)
        self._dicts: tuple[dict[int, Any], ...] = (
            self._allowed,
            self._bias,
            self._min_tokens,
            self._penalties,
            self._bad_words,
            self._logprobs,
        )

    def add(self, params: SamplingParams, seed: int, prompt_ids: np.ndarray, output_ids: list[int]) -> None:
        """Append a row.

        Args:
            params: resolved parameters.
            seed: of the row's noise, taken modulo 2**64.
            prompt_ids: the prompt alone, also after a preemption.
            output_ids: the request's outputs so far; the list stays the owner's and grows.
        """
        row = len(self._outputs)
        self._outputs.append(output_ids)
        self._temperature[row] = 0.0 if params.is_greedy else params.temperature
        self._top_k[row], self._top_p[row], self._min_p[row] = params.top_k, params.top_p, params.min_p
        self._seeds[row] = seed & 0xFFFF_FFFF_FFFF_FFFF
        if not params.is_greedy:
            self._random.add(row)
            if params.top_k > 0:
                self._with_k.add(row)
            if params.top_p < 1:
                self._with_p.add(row)
            if params.min_p > 0:
                self._with_min_p.add(row)
        self._add_features(row, params, prompt_ids)

    def _add_features(self, row: int, params: SamplingParams, prompt_ids: np.ndarray) -> None:
        outputs = self._outputs[row]
        if params.allowed_token_ids is not None:
            self._allowed[row] = np.unique(np.array(params.allowed_token_ids, np.int64))
        if params.logit_bias:
            ids, values = zip(*params.logit_bias.items(), strict=True)
            self._bias[row] = np.array(ids, np.int64), np.array(values, np.float32)
        # A tokenizer may know more tokens than the model scores; those never come out anyway.
        stop_set = [token for token in params.stop_set if token < self._vocab_size]
        bad_words = [word for word in params.bad_words_token_ids if max(word) < self._vocab_size]
        if len(outputs) < params.min_tokens and stop_set:
            self._min_tokens[row] = params.min_tokens, np.array(stop_set, np.int64)
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            self._penalties[row] = _Penalties(
                TokenCounts(prompt_ids, outputs),
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        if bad_words:
            self._bad_words[row] = bad_words
        if params.logprobs is not None or params.logprob_token_ids is not None:
            self._logprobs[row] = params.logprobs or 0, params.logprob_token_ids

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""
        last = len(self._outputs) - 1
        self._outputs[row] = self._outputs[last]
        self._outputs.pop()
        for array in self._arrays:
            array[row] = array[last]
        for members in self._sets:
            members.discard(row)
            if last in members:
                members.remove(last)
                members.add(row)
        for feature in self._dicts:
            feature.pop(row, None)
            if last in feature:
                feature[row] = feature.pop(last)

    def select(self, rows: np.ndarray | None, positions_R: np.ndarray) -> SamplingBatch:
        """State of the sampling rows as the sampler wants it.

        Args:
            rows: batch rows in the order of the logits; None: all rows, in order.
            positions_R: int64, position of each row's input token.
        """
        num_rows = len(self._outputs) if rows is None else len(rows)
        batch = SamplingBatch(num_rows)
        pick: Any = slice(num_rows) if rows is None else rows
        if self._random:
            batch.temperature_R = self._temperature[pick]
            batch.seeds_R, batch.positions_R = self._seeds[pick], positions_R
            batch.top_k_R = self._top_k[pick] if self._with_k else None
            batch.top_p_R = self._top_p[pick] if self._with_p else None
            batch.min_p_R = self._min_p[pick] if self._with_min_p else None
        if any(self._dicts):
            wanted = range(num_rows) if rows is None else rows.tolist()
            self._select_features(batch, {row: i for i, row in enumerate(wanted)})
        return batch

    def _select_features(self, batch: SamplingBatch, place: dict[int, int]) -> None:
        """Fill in the rare features; ``place`` maps the sampling batch rows to logits rows."""
        batch.allowed = [(place[row], ids) for row, ids in self._allowed.items() if row in place]
        for row, (ids, values) in self._bias.items():
            if row in place:
                batch.bias.append((place[row], ids))
                batch.bias_values.append(values)
        for row, (minimum, ids) in list(self._min_tokens.items()):
            if len(self._outputs[row]) >= minimum:
                del self._min_tokens[row]
            elif row in place:
                batch.min_tokens.append((place[row], ids))
        for row, penalties in self._penalties.items():
            if row in place:
                ids, counts = penalties.counts.refresh()
                batch.penalised.append(
                    Penalised(place[row], ids, counts, penalties.repetition, penalties.frequency, penalties.presence)
                )
        for row, words in self._bad_words.items():
            if row in place and (banned := banned_endings(words, self._outputs[row])):
                batch.bad_words.append((place[row], np.array(banned, np.int64)))
        for row, (num_top, chosen) in self._logprobs.items():
            if row in place:
                batch.logprobs.append(LogprobWish(place[row], num_top, chosen))
