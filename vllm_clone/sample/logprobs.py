"""Scores that requests ask to see: of the sampled token, of the best N, of chosen ids. V vocabulary, T positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from vllm_clone.kernels import TokenLists
from vllm_clone.messages import LogprobRows
from vllm_clone.sample.adjust import kernels_for

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@dataclass(frozen=True, slots=True)
class LogprobWish:
    """What one row wants to see next to its token: ``num_top`` scores (−1: all), or those of ``token_ids``."""

    row: int
    num_top: int
    token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Scores of several positions as arrays, which are cheap to make; the lists that messages carry are not.

    ``starts_E1`` says where each position's entries lie: its token, then the others in the order asked for.
    """

    starts_E1: np.ndarray
    ids_N: np.ndarray
    scores_N: np.ndarray
    ranks_E: np.ndarray

    def rows(self) -> LogprobRows:
        """One row per position."""
        ids, scores, bounds = self.ids_N.tolist(), self.scores_N.tolist(), self.starts_E1.tolist()
        spans = [slice(start, end) for start, end in pairwise(bounds)]
        return LogprobRows([ids[span] for span in spans], [scores[span] for span in spans], self.ranks_E.tolist())


def score_wishes(
    logits_RV: torch.Tensor, rows: Sequence[int], tokens_E: torch.Tensor, wishes: Sequence[LogprobWish], logprobs: bool
) -> ScoreTable:
    """What each wish asks for, of log-probabilities or of logits.

    Args:
        logits_RV: float32.
        rows: of the logits, one per wish (which may count rows otherwise).
        tokens_E: int64, each wish's sampled token.
        wishes: what to score.
        logprobs: natural-log probabilities; otherwise logits.
    """
    vocab_size = logits_RV.shape[1]
    counts = [
        len(w.token_ids) if w.token_ids is not None else vocab_size if w.num_top < 0 else min(w.num_top, vocab_size)
        for w in wishes
    ]
    starts_E1 = np.zeros(len(wishes) + 1, np.int64)
    np.cumsum([1 + count for count in counts], out=starts_E1[1:])
    lists = TokenLists(np.array(rows, np.int64), starts_E1, np.empty(starts_E1[-1], np.int64))
    chosen_E = np.zeros(len(wishes), np.bool_)
    for i, wish in enumerate(wishes):
        if wish.token_ids is not None:
            chosen_E[i] = True
            lists.ids_N[starts_E1[i] + 1 : starts_E1[i + 1]] = wish.token_ids
    scores_N, ranks_E = kernels_for(logits_RV).score_tokens(logits_RV, tokens_E, lists, chosen_E, logprobs=logprobs)
    return ScoreTable(starts_E1, lists.ids_N, scores_N, ranks_E)


def score_tokens(logits_TV: torch.Tensor, tokens_T: torch.Tensor, num_top: int) -> LogprobRows:
    """Log-probabilities of one token (int64) per position, then of the ``num_top`` best (−1: all), best first.

    The given token may appear twice; its rank is the number of scores at least as high as its own.
    """
    positions = range(len(logits_TV))
    wishes = [LogprobWish(i, num_top) for i in positions]
    return score_wishes(logits_TV, positions, tokens_T, wishes, True).rows()
