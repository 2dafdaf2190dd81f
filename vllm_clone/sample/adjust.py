"""Edits of logits before any draw: allowed ids, bias, masked ids, penalties, bad words.

Each takes only the rows that ask for it, so a batch without a feature pays nothing for it. All work in place on
float32 logits [R, V], touching no other entries than the ones they name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

RowIds = tuple[int, np.ndarray]
"""A row of the logits and token ids (int64) in it."""


@dataclass(frozen=True, slots=True)
class Penalised:
    """One row's penalties and the tokens they touch: ids seen so far, and how often each was generated."""

    row: int
    token_ids: np.ndarray
    """int64, distinct: every token of prompt and output."""
    output_counts: np.ndarray
    """int32, 0 for tokens that only the prompt has."""
    repetition: float
    frequency: float
    presence: float


def _indices(entries: Sequence[RowIds], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.repeat([row for row, _ in entries], [len(ids) for _, ids in entries])
    ids = np.concatenate([ids for _, ids in entries])
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


def allow_only(logits_RV: torch.Tensor, entries: Sequence[RowIds]) -> None:
    """Set everything but the listed ids of the listed rows to −inf."""
    at = _indices(entries, logits_RV.device)
    kept = logits_RV[at]
    logits_RV[[row for row, _ in entries]] = -torch.inf
    logits_RV[at] = kept


def add_bias(logits_RV: torch.Tensor, entries: Sequence[RowIds], values: Sequence[np.ndarray]) -> None:
    """Add to each listed id its value (float32); ids are distinct within a row."""
    bias = torch.from_numpy(np.concatenate(values)).to(logits_RV.device)
    logits_RV[_indices(entries, logits_RV.device)] += bias


def mask(logits_RV: torch.Tensor, entries: Sequence[RowIds]) -> None:
    """Set the listed ids to −inf."""
    logits_RV[_indices(entries, logits_RV.device)] = -torch.inf


def penalise(logits_RV: torch.Tensor, entries: Sequence[Penalised]) -> None:
    """Repetition on prompt and output tokens, then frequency and presence on output tokens."""
    device = logits_RV.device
    at = _indices([(e.row, e.token_ids) for e in entries], device)
    lengths = [len(e.token_ids) for e in entries]
    scales = np.array([(e.repetition, e.frequency, e.presence) for e in entries], dtype=np.float32)
    repetition, frequency, presence = torch.from_numpy(np.repeat(scales.T, lengths, axis=1)).to(device)
    counts = torch.from_numpy(np.concatenate([e.output_counts for e in entries])).to(device)
    x = logits_RV[at]
    x = torch.where(x > 0, x / repetition, x * repetition)
    logits_RV[at] = x - frequency * counts - presence * (counts > 0)


def banned_endings(words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """Last ids of the words whose earlier ids are exactly what the output ends with."""
    num_outputs = len(output_ids)
    return [
        word[-1]
        for word in words
        if len(word) <= num_outputs + 1 and list(output_ids[num_outputs - len(word) + 1 :]) == list(word[:-1])
    ]
