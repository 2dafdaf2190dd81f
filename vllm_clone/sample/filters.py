"""min-p, top-k and top-p as one threshold per row: a token survives when its score reaches the threshold.

Scores are logits after the temperature; the filters act in the order min-p, top-k, top-p, each on what the
earlier ones left. Tokens that tie with the last survivor survive too, so no result depends on a sort's order.
R rows, V vocabulary, K leading scores in descending order.
"""

import torch

_BIN_SHIFT = 17
_NUM_BINS = (0x3F800000 >> _BIN_SHIFT) + 1
"""Bins of float32 values from 0 to 1 by their upper bits: 64 for each halving."""


def thresholds(
    x_RV: torch.Tensor,
    top_k_R: torch.Tensor | None,
    top_p_R: torch.Tensor | None,
    min_p_R: torch.Tensor | None,
) -> torch.Tensor:
    """Lowest surviving score of each row, float32 [R]; −inf where nothing is dropped.

    Args:
        x_RV: float32 scores, each row with a finite maximum.
        top_k_R: int64, keep the k largest; 0 keeps all. None: no row filters by k. Likewise below.
        top_p_R: float32 in (0, 1], keep the most probable tokens until their mass reaches p; 1 keeps all.
        min_p_R: float32 in [0, 1], keep tokens with at least this fraction of the largest probability.
    """
    vocab_size = x_RV.shape[1]
    if min_p_R is None:
        floor_R = x_RV.new_full((x_RV.shape[0],), -torch.inf)
    else:
        floor_R = x_RV.amax(-1) + min_p_R.log()
    if top_k_R is None:
        return floor_R if top_p_R is None else _nucleus_of_all(x_RV, top_p_R, floor_R)

    limited_R = (top_k_R > 0) & (top_k_R < vocab_size)
    rows = limited_R.nonzero().squeeze(-1)
    if len(rows):
        top_p = None if top_p_R is None else top_p_R[rows]
        floor_R[rows] = _nucleus_of_k(x_RV[rows], top_k_R[rows], top_p, floor_R[rows])
    if top_p_R is not None:
        rows = (~limited_R & (top_p_R < 1)).nonzero().squeeze(-1)
        if len(rows):
            floor_R[rows] = _nucleus_of_all(x_RV[rows], top_p_R[rows], floor_R[rows])
    return floor_R


def _nucleus_of_k(
    x_RV: torch.Tensor, k_R: torch.Tensor, p_R: torch.Tensor | None, floor_R: torch.Tensor
) -> torch.Tensor:
    """Thresholds of rows that all have a k below V, and perhaps a p."""
    lead_RK = x_RV.topk(int(k_R.max())).values
    kth_R = lead_RK.gather(1, k_R[:, None] - 1).squeeze(-1)
    floor_R = torch.maximum(kth_R, floor_R)
    if p_R is None:
        return floor_R
    rank_K = torch.arange(lead_RK.shape[1], device=x_RV.device)
    dropped_RK = (rank_K >= k_R[:, None]) | (lead_RK < floor_R[:, None])
    mass_RK = (lead_RK - lead_RK[:, :1]).exp_().masked_fill_(dropped_RK, 0.0)
    before_RK = mass_RK.cumsum(-1) - mass_RK
    wanted_R = p_R * mass_RK.sum(-1)
    kept_R = ((before_RK < wanted_R[:, None]) & ~dropped_RK).sum(-1).clamp_(min=1)
    threshold_R = lead_RK.gather(1, kept_R[:, None] - 1).squeeze(-1)
    return torch.where(p_R < 1, torch.maximum(threshold_R, floor_R), floor_R)


def _nucleus_of_all(x_RV: torch.Tensor, p_R: torch.Tensor, floor_R: torch.Tensor) -> torch.Tensor:
    """Thresholds of rows without a k, without sorting a vocabulary: a histogram finds the bin of the last survivor.

    Probabilities lie in [0, 1], where the bits of a float32 order as the float does: their upper bits are the bin.
    Only the tokens of that one bin are then sorted. N tokens in the rows' last bins.
    """
    num_rows = x_RV.shape[0]
    mass_RV = (x_RV - x_RV.amax(-1, keepdim=True)).exp_().masked_fill_(x_RV < floor_R[:, None], 0.0)
    mass_RV.nan_to_num_(1.0)  # a row of −inf alone, or of NaN, has no distribution but must end in some token
    bin_RV = mass_RV.view(torch.int32) >> _BIN_SHIFT
    first_bin_R1 = torch.arange(num_rows, dtype=torch.int32, device=x_RV.device)[:, None] * _NUM_BINS
    weights = mass_RV.double().flatten()
    weight_RB = torch.bincount((bin_RV + first_bin_R1).flatten(), weights, num_rows * _NUM_BINS).view(num_rows, -1)
    reached_RB = weight_RB.flip(-1).cumsum_(-1).flip(-1)
    # A p below float32's range is 0 here; the most probable token survives all the same.
    wanted_R = (p_R * reached_RB[:, 0]).clamp_(min=torch.finfo(torch.float64).tiny)
    heavier_RB = torch.nn.functional.pad(reached_RB[:, 1:], (0, 1))  # not a difference: it must equal its neighbour
    last_R = (heavier_RB >= wanted_R[:, None]).sum(-1, keepdim=True)  # bins whose heavier neighbours suffice: dropped

    rows_N, tokens_N = (bin_RV == last_R.int()).nonzero(as_tuple=True)
    x_N, order_N = x_RV[rows_N, tokens_N].sort(descending=True)
    rows_N, by_row_N = rows_N[order_N].sort(stable=True)
    x_N = x_N[by_row_N]
    mass_N = mass_RV[rows_N, tokens_N[order_N][by_row_N]].double()
    before_N = mass_N.cumsum(-1) - mass_N
    starts_R = torch.searchsorted(rows_N, torch.arange(num_rows, device=x_RV.device))
    room_R = wanted_R - heavier_RB.gather(1, last_R).squeeze(-1)
    kept_N = before_N - before_N[starts_R][rows_N] < room_R[rows_N]
    threshold_R = x_RV.new_full((num_rows,), torch.inf)
    threshold_R.scatter_reduce_(0, rows_N[kept_N], x_N[kept_N], "amin")
    return torch.where(p_R < 1, torch.maximum(threshold_R, floor_R), floor_R)
