"""Scores that requests ask to see: of the sampled token, of the best N, of chosen ids. L rows, V vocabulary."""

from typing import Literal

import torch

from vllm_clone.messages import LogprobRows

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


def scores_of(logits_LV: torch.Tensor, mode: LogprobsMode) -> torch.Tensor:
    """Natural-log probabilities, or a copy of the logits when the mode reports logits; float32 [L, V]."""
    return logits_LV.clone() if mode.endswith("logits") else logits_LV.log_softmax(-1)


def top_rows(scores_LV: torch.Tensor, tokens_L: torch.Tensor, num_top: int) -> LogprobRows:
    """One row per position: the given token, then the ``num_top`` best (−1: all) in descending order.

    The given token may appear twice; its rank is the number of scores at least as high as its own.
    """
    tokens_L1 = tokens_L[:, None]
    ids, scores = tokens_L1, scores_LV.gather(1, tokens_L1)
    ranks = (scores_LV >= scores).sum(-1)
    if num_top:
        best = scores_LV.topk(scores_LV.shape[1] if num_top < 0 else min(num_top, scores_LV.shape[1]))
        ids, scores = torch.cat((ids, best.indices), 1), torch.cat((scores, best.values), 1)
    return LogprobRows(ids.tolist(), scores.tolist(), ranks.tolist())


def chosen_row(scores_V: torch.Tensor, token: int, chosen_ids: list[int]) -> LogprobRows:
    """One row: the sampled token, then exactly the chosen ids in their order."""
    ids = [token, *chosen_ids]
    rank = int((scores_V >= scores_V[token]).sum())
    return LogprobRows([ids], [scores_V[ids].tolist()], [rank])
