"""Edits of logits before any draw: grammar, allowed ids, bias, masked ids, penalties, bad words.

Each takes only the rows that ask for it, so a batch without a feature pays nothing for it. All work in place on
float32 logits [R, V], touching no other entries than the ones they name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from vllm_clone import kernels
from vllm_clone.kernels import TokenLists, reference

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


@dataclass(frozen=True, slots=True)
class Bitmask:
    """What the grammars of some rows allow."""

    rows_E: np.ndarray
    """int64, rows of the logits."""
    words_EW: np.ndarray
    """int32, at least ⌈V/32⌉ words a row: bit v % 32 of word v // 32 allows token v."""


def kernels_for(logits_RV: torch.Tensor) -> ModuleType:
    """Functions of :mod:`vllm_clone.kernels` for the device of the logits."""
    return kernels if logits_RV.is_cpu else reference


def token_lists(rows: Sequence[int], ids: Sequence[np.ndarray]) -> TokenLists:
    """Rows and the ids (int64) in each, as the kernels take them."""
    starts_E1 = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(part) for part in ids], out=starts_E1[1:])
    return TokenLists(np.array(rows, np.int64), starts_E1, np.concatenate(ids))


def _lists_of(entries: Sequence[RowIds]) -> TokenLists:
    return token_lists([row for row, _ in entries], [ids for _, ids in entries])


def allow_bits(logits_RV: torch.Tensor, bitmask: Bitmask) -> None:
    """Set to −inf what a grammar does not allow."""
    kernels_for(logits_RV).apply_bitmask_(logits_RV, bitmask.rows_E, bitmask.words_EW)


def allow_only(logits_RV: torch.Tensor, entries: Sequence[RowIds]) -> None:
    """Set everything but the listed ids of the listed rows to −inf."""
    kernels_for(logits_RV).keep_only_(logits_RV, _lists_of(entries))


def add_bias(logits_RV: torch.Tensor, entries: Sequence[RowIds], values: Sequence[np.ndarray]) -> None:
    """Add to each listed id its value (float32); ids are distinct within a row."""
    kernels_for(logits_RV).add_at_(logits_RV, _lists_of(entries), np.concatenate(values))


def mask(logits_RV: torch.Tensor, entries: Sequence[RowIds], *, unless_last: bool = False) -> None:
    """Set the listed ids to −inf; with ``unless_last`` not where a row would have nothing else left."""
    kernels_for(logits_RV).mask_at_(logits_RV, _lists_of(entries), unless_last=unless_last)


def penalise(logits_RV: torch.Tensor, entries: Sequence[Penalised]) -> None:
    """Repetition on prompt and output tokens, then frequency and presence on output tokens."""
    lists = token_lists([e.row for e in entries], [e.token_ids for e in entries])
    occurrences_N = np.concatenate([e.output_counts for e in entries])
    scales_E3 = np.array([(e.repetition, e.frequency, e.presence) for e in entries], np.float32)
    kernels_for(logits_RV).penalise_(logits_RV, lists, occurrences_N, scales_E3)


def banned_endings(words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """Last ids of the words whose earlier ids are exactly what the output ends with."""
    num_outputs = len(output_ids)
    return [
        word[-1]
        for word in words
        if len(word) <= num_outputs + 1 and list(output_ids[num_outputs - len(word) + 1 :]) == list(word[:-1])
    ]
