"""min-p, top-k and top-p as one threshold per row: a token survives when its score reaches the threshold.

Scores are logits after the temperature; the filters act in the order min-p, top-k, top-p, each on what the
earlier ones left. Tokens that tie with the last survivor survive too, so no result depends on a sort's order.
R rows, V vocabulary, K leading scores in descending order.
"""

import torch

_PREFIX = 256
"""Nuclei up to this size are found in the leading scores; larger ones by bisection."""


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
        if top_p_R is not None:
            _nucleus_of_all(x_RV, top_p_R, floor_R)
        return floor_R

    limited_R = (top_k_R > 0) & (top_k_R < vocab_size)
    rows = limited_R.nonzero().squeeze(-1)
    if len(rows):
        top_p = None if top_p_R is None else top_p_R[rows]
        floor_R[rows] = _nucleus_of_k(x_RV[rows], top_k_R[rows], top_p, floor_R[rows])
    if top_p_R is not None:
        rows = (~limited_R & (top_p_R < 1)).nonzero().squeeze(-1)
        if len(rows):
            floor = floor_R[rows]
            _nucleus_of_all(x_RV[rows], top_p_R[rows], floor)
            floor_R[rows] = floor
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
    threshold_R, _ = _cut(lead_RK, mass_RK, p_R * mass_RK.sum(-1))
    return torch.where(p_R < 1, torch.maximum(threshold_R, floor_R), floor_R)


def _nucleus_of_all(x_RV: torch.Tensor, p_R: torch.Tensor, floor_R: torch.Tensor) -> None:
    """Raise ``floor_R`` to the top-p thresholds of rows without a k, in place."""
    lead_RK = x_RV.topk(min(_PREFIX, x_RV.shape[1])).values
    mass_RV = (x_RV - lead_RK[:, :1]).exp_()
    mass_RV.masked_fill_(x_RV < floor_R[:, None], 0.0)
    wanted_R = p_R * mass_RV.sum(-1)
    mass_RK = (lead_RK - lead_RK[:, :1]).exp_().masked_fill_(lead_RK < floor_R[:, None], 0.0)
    threshold_R, reached_R = _cut(lead_RK, mass_RK, wanted_R)
    filtered_R = p_R < 1
    deep = (filtered_R & ~reached_R).nonzero().squeeze(-1)
    if len(deep):
        threshold_R[deep] = _bisect(x_RV[deep], mass_RV[deep], wanted_R[deep], p_R[deep])
    torch.maximum(floor_R, threshold_R.masked_fill_(~filtered_R, -torch.inf), out=floor_R)


def _cut(lead_RK: torch.Tensor, mass_RK: torch.Tensor, wanted_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The score at which the mass in front reaches ``wanted``, and whether it does within the leading scores."""
    total_RK = mass_RK.cumsum(-1)
    kept_R = ((total_RK - mass_RK < wanted_R[:, None]) & (mass_RK > 0)).sum(-1).clamp_(min=1)
    return lead_RK.gather(1, kept_R[:, None] - 1).squeeze(-1), total_RK[:, -1] >= wanted_R


def _bisect(x_RV: torch.Tensor, mass_RV: torch.Tensor, wanted_R: torch.Tensor, p_R: torch.Tensor) -> torch.Tensor:
    """The lowest score whose strictly heavier tokens weigh less than ``wanted``, for nuclei of any size.

    Bisects over the bits of the mass, which order like the floats they are since masses lie in [0, 1].
    """
    mass_bits_RV = mass_RV.view(torch.int32)
    high_R = mass_bits_RV.amax(-1)
    # Tokens lighter than (1 − p) · total / V weigh less than 1 − p together: the cut is above them.
    lightest_R = ((wanted_R / p_R - wanted_R) / x_RV.shape[1] * 0.5).clamp_(min=0.0)
    low_R = torch.minimum(lightest_R.view(torch.int32), high_R)
    while bool((low_R < high_R).any()):
        middle_R = low_R + (high_R - low_R) // 2
        heavier_R = torch.where(mass_bits_RV > middle_R[:, None], mass_RV, 0.0).sum(-1)
        enough_R = heavier_R < wanted_R
        high_R = torch.where(enough_R, middle_R, high_R)
        low_R = torch.where(enough_R, low_R, middle_R + 1)
    return x_RV.masked_fill(mass_bits_RV < high_R[:, None], torch.inf).amin(-1)
