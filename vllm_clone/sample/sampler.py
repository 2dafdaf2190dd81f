"""One token per row of logits, by the row's own rules. R rows, V vocabulary, L rows that want logprobs."""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_clone.messages import LogprobRows
from vllm_clone.sample import adjust
from vllm_clone.sample.batch import LogprobWish, SamplingBatch
from vllm_clone.sample.draw import argmax_rows, draw_above, draw_dense
from vllm_clone.sample.filters import thresholds
from vllm_clone.sample.logprobs import LogprobsMode, chosen_row, scores_of, top_rows
from vllm_clone.sample.noise import row_keys


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Sampled ids, and the scores of the rows that asked for them, by row."""

    token_ids: list[int]
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)


class Sampler:
    """Greedy and random sampling. A step costs only what some row of it uses.

    Order: allowed ids, logit bias, min_tokens, penalties, bad words, temperature, min-p, top-k, top-p, draw.
    """

    def __init__(self, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self._mode: LogprobsMode = logprobs_mode

    def __call__(self, logits_RV: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Sample every row.

        Args:
            logits_RV: float32; changed in place.
            batch: one entry per row of the logits.
        """
        scores_LV = None
        if batch.logprobs and self._mode.startswith("raw"):
            scores_LV = scores_of(_rows_of(logits_RV, batch.logprobs, batch.num_rows), self._mode)
        _edit(logits_RV, batch)
        if batch.temperature_R is None:
            ids_R = argmax_rows(logits_RV)
        else:
            keep_filtered = bool(batch.logprobs) and scores_LV is None
            ids_R = _sample_mixed(logits_RV, batch, batch.temperature_R, keep_filtered)
        if not batch.logprobs:
            return SamplerOutput(ids_R.tolist())
        if scores_LV is None:
            scores_LV = scores_of(_rows_of(logits_RV, batch.logprobs, batch.num_rows), self._mode)
        token_ids = ids_R.tolist()
        return SamplerOutput(token_ids, _logprobs(scores_LV, token_ids, batch.logprobs))


def _rows_of(logits_RV: torch.Tensor, wishes: list[LogprobWish], num_rows: int) -> torch.Tensor:
    rows = [wish.row for wish in wishes]
    return logits_RV if rows == list(range(num_rows)) else logits_RV[rows]


def _edit(logits_RV: torch.Tensor, batch: SamplingBatch) -> None:
    if batch.allowed:
        adjust.allow_only(logits_RV, batch.allowed)
    if batch.bias:
        adjust.add_bias(logits_RV, batch.bias, batch.bias_values)
    if batch.min_tokens:
        adjust.mask(logits_RV, batch.min_tokens)
    if batch.penalised:
        adjust.penalise(logits_RV, batch.penalised)
    if batch.bad_words:
        adjust.mask(logits_RV, batch.bad_words)


def _sample_mixed(
    logits_RV: torch.Tensor, batch: SamplingBatch, temperature_R: np.ndarray, keep_filtered: bool
) -> torch.Tensor:
    """Ids of a batch with random rows, and perhaps greedy ones; int64 [R].

    With ``keep_filtered`` the random rows of the logits become what was drawn from: scaled, −inf where filtered.
    """
    random = np.flatnonzero(temperature_R)
    if len(random) == batch.num_rows:
        return _sample_random(logits_RV, batch, random, keep_filtered)
    ids_R = argmax_rows(logits_RV)
    if len(random):
        at = torch.from_numpy(random).to(logits_RV.device)
        x_RV = logits_RV[at]
        ids_R[at] = _sample_random(x_RV, batch, random, keep_filtered)
        if keep_filtered:
            logits_RV[at] = x_RV
    return ids_R


def _sample_random(x_RV: torch.Tensor, batch: SamplingBatch, rows: np.ndarray, keep_filtered: bool) -> torch.Tensor:
    """Draw from rows that all have a temperature; ``rows`` are their places in the batch. ``x_RV`` is changed."""
    assert batch.temperature_R is not None
    assert batch.seeds_R is not None
    assert batch.positions_R is not None
    device = x_RV.device
    x_RV /= torch.from_numpy(batch.temperature_R[rows]).to(device)[:, None]
    key_a, key_b = row_keys(batch.seeds_R[rows], batch.positions_R[rows])
    key_a_R, key_b_R = torch.from_numpy(key_a).to(device), torch.from_numpy(key_b).to(device)

    filtered_R = np.zeros(len(rows), bool)
    for values, off in ((batch.top_k_R, 0), (batch.top_p_R, 1), (batch.min_p_R, 0)):
        if values is not None:
            filtered_R |= values[rows] != off
    if not filtered_R.any():
        return draw_dense(x_RV, key_a_R, key_b_R)

    k_R, p_R, min_p_R = (
        None if values is None else torch.from_numpy(values[rows]).to(device)
        for values in (batch.top_k_R, batch.top_p_R, batch.min_p_R)
    )
    if filtered_R.all():
        threshold_R = thresholds(x_RV, k_R, p_R, min_p_R)
        ids_R = draw_above(x_RV, threshold_R, key_a_R, key_b_R)
    else:
        narrow = torch.from_numpy(np.flatnonzero(filtered_R)).to(device)
        wide = torch.from_numpy(np.flatnonzero(~filtered_R)).to(device)
        threshold_R = x_RV.new_full((len(rows),), -torch.inf)
        ids_R = torch.empty(len(rows), dtype=torch.int64, device=device)
        x = x_RV[narrow]
        k, p, min_p = (None if values is None else values[narrow] for values in (k_R, p_R, min_p_R))
        threshold_R[narrow] = threshold = thresholds(x, k, p, min_p)
        ids_R[narrow] = draw_above(x, threshold, key_a_R[narrow], key_b_R[narrow])
        ids_R[wide] = draw_dense(x_RV[wide], key_a_R[wide], key_b_R[wide])
    if keep_filtered:
        x_RV.masked_fill_(x_RV < threshold_R[:, None], -torch.inf)
    return ids_R


def _logprobs(scores_LV: torch.Tensor, token_ids: list[int], wishes: list[LogprobWish]) -> dict[int, LogprobRows]:
    """Rows by logits row; rows with equal N are ranked together."""
    by_count: dict[int, list[int]] = {}
    result = {}
    for i, wish in enumerate(wishes):
        if wish.token_ids is None:
            by_count.setdefault(wish.num_top, []).append(i)
        else:
            result[wish.row] = chosen_row(scores_LV[i], token_ids[wish.row], wish.token_ids)
    for num_top, places in by_count.items():
        rows = [wishes[i].row for i in places]
        scores = scores_LV if len(places) == len(wishes) else scores_LV[places]
        tokens = torch.tensor([token_ids[row] for row in rows], device=scores.device)
        table = top_rows(scores, tokens, num_top)
        for row, ids, values, rank in zip(rows, table.token_ids, table.logprobs, table.ranks, strict=True):
            result[row] = LogprobRows([ids], [values], [rank])
    return result
