"""From logits to tokens in plain torch, on any device: noise, filters, the draw, edits and scores.

The noise is a pure function of (seed, position, token id), so that who shares a batch never changes a draw: a 64-bit
mix of seed and position gives each row two 32-bit keys; a 32-bit counter hash of the token id under those keys gives
the bits.

min-p, top-k and top-p are one threshold per row: a token survives when its score reaches it. They act in that order,
each on what the earlier ones left. Tokens that tie with the last survivor survive too, so no result depends on a
sort's order; of those that tie with the k-th, only as many as k has room for count in the mass that top-p divides.

Axis suffixes: R rows, V vocabulary, E entries (a row and a list of token ids in it), N ids of all entries in turn.
Logits are float32, and NaN counts as −inf.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)
_MIX_64_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_64_B = np.uint64(0x94D049BB133111EB)
_STRIDE = 0x9E3779B1
_MIX_32_A = 0x7FEB352D
_MIX_32_B = 0x846CA68B
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
_MASSES_IN_ONE = 2.0**42
"""Probability mass is counted in integers, whose sums no order changes."""
_ENOUGH = 1.0 - 2.0**-21
"""A p of float32 is inexact, as the masses are: what is missing by so little does not make another token needed."""


class TokenLists(NamedTuple):
    """Token ids of some rows, E entries one after the other."""

    rows_E: np.ndarray
    """int64, the row of the logits; rows may repeat."""
    starts_E1: np.ndarray
    """int64, entry e has the ids from ``starts_E1[e]`` up to ``starts_E1[e + 1]``."""
    ids_N: np.ndarray
    """int64."""

    def indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and token of every id."""
        rows_N = np.repeat(self.rows_E, np.diff(self.starts_E1))
        return torch.from_numpy(rows_N).to(device), torch.from_numpy(self.ids_N).to(device)


def _signed(value: int) -> int:
    """The int32 with the same bits as an unsigned 32-bit value."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix_64(x_R: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser of (x + golden ratio), modulo 2**64."""
    x_R = x_R + _GOLDEN_64
    x_R = (x_R ^ (x_R >> np.uint64(30))) * _MIX_64_A
    x_R = (x_R ^ (x_R >> np.uint64(27))) * _MIX_64_B
    return x_R ^ (x_R >> np.uint64(31))


def _row_keys(seeds_R: np.ndarray, positions_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two int32 keys per row."""
    mixed_R = _mix_64(_mix_64(seeds_R) ^ positions_R.astype(np.uint64))
    return mixed_R.astype(np.uint32).view(np.int32), (mixed_R >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _xor_shift_(h: torch.Tensor, bits: int) -> None:
    """h ^= h >> bits with a logical shift, in place."""
    h ^= (h >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def exponential_noise(
    seeds_R: np.ndarray, positions_R: np.ndarray, vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Exp(1) noise for every token of every row, float32 [R, V], finite and above 0.

    The 31-bit uniform u keeps its resolution near 0, because small exponentials are what wins draws.

    Args:
        seeds_R: uint64.
        positions_R: int64.
        vocab_size: V.
        device: of the result.
    """
    early_R1, late_R1 = (torch.from_numpy(key)[:, None].to(device) for key in _row_keys(seeds_R, positions_R))
    ids_V = torch.arange(vocab_size, dtype=torch.int64, device=device)
    h = ids_V.mul_(_signed(_STRIDE)).to(torch.int32) + early_R1
    _xor_shift_(h, 16)
    h *= _MIX_32_A
    _xor_shift_(h, 15)
    h += late_R1
    h *= _signed(_MIX_32_B)
    _xor_shift_(h, 16)
    h &= 0x7FFFFFFF
    u = h.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
    return u.neg_().log1p_().neg_()


def thresholds(
    x_RV: torch.Tensor,
    top_k_R: torch.Tensor | None,
    top_p_R: torch.Tensor | None,
    min_p_R: torch.Tensor | None,
) -> torch.Tensor:
    """Lowest surviving score of each row, float32 [R]; −inf where nothing is dropped.

    Args:
        x_RV: scores, logits after the temperature, each row with a finite maximum.
        top_k_R: int64, keep the k largest; 0 keeps all. None: no row filters by k. Likewise below.
        top_p_R: float32 in [0, 1], keep the most probable tokens until their mass reaches p; 1 keeps all.
        min_p_R: float32 in [0, 1], keep tokens with at least this fraction of the largest probability.
    """
    lead_RV = x_RV.sort(descending=True).values
    peak_R1 = lead_RV[:, :1]
    kept_RV = lead_RV >= -torch.inf if min_p_R is None else lead_RV >= peak_R1 + min_p_R.log()[:, None]
    if top_k_R is not None:
        within_k = torch.arange(x_RV.shape[1], device=x_RV.device) < top_k_R[:, None]
        kept_RV &= within_k | (top_k_R <= 0)[:, None]
    if top_p_R is not None:
        mass_RV = (lead_RV - peak_R1).exp_().double().mul_(_MASSES_IN_ONE).round_().long().masked_fill_(~kept_RV, 0)
        wanted_R = (top_p_R.double() * _ENOUGH * mass_RV.sum(-1)).ceil_().long().clamp_(min=1)
        before_RV = mass_RV.cumsum(-1) - mass_RV
        kept_RV &= (before_RV < wanted_R[:, None]) | (top_p_R >= 1)[:, None]
    last_R1 = kept_RV.sum(-1, keepdim=True) - 1
    threshold_R = lead_RV.gather(1, last_R1).squeeze(-1)
    return torch.where(kept_RV.all(-1), -torch.inf, threshold_R)


def sample_tokens(
    logits_RV: torch.Tensor,
    temperature_R: np.ndarray | None = None,
    top_k_R: np.ndarray | None = None,
    top_p_R: np.ndarray | None = None,
    min_p_R: np.ndarray | None = None,
    seeds_R: np.ndarray | None = None,
    positions_R: np.ndarray | None = None,
    *,
    keep: bool = False,
) -> torch.Tensor:
    """One token per row, int64 [R]: the highest logit (of equals the lowest token), or a draw by Gumbel's maximum.

    A drawn token has the highest x/T − ln E among those that survive the filters, E ~ Exp(1). A row whose highest
    score is infinite gets the lowest token that has it.

    Args:
        logits_RV: they stay as they are unless ``keep``.
        temperature_R: float32, 0 marks a greedy row; None: every row is greedy, and the rest is ignored.
        top_k_R: int64, 0 = off. None: no row uses it; likewise the next two.
        top_p_R: float32, 1 = off.
        min_p_R: float32, 0 = off.
        seeds_R: uint64.
        positions_R: int64, position of the input token whose successor is drawn.
        keep: the drawn rows of the logits become what was drawn from: divided by T, −inf where filtered.
    """
    device = logits_RV.device
    clean_RV = logits_RV.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    ids_R = clean_RV.argmax(-1)
    if temperature_R is None:
        return ids_R
    assert seeds_R is not None
    assert positions_R is not None
    scaled_RV = clean_RV / torch.from_numpy(np.where(temperature_R > 0, temperature_R, 1)).to(device)[:, None]
    drawn = (temperature_R > 0) & scaled_RV.amax(-1).isfinite().cpu().numpy()
    rows = torch.from_numpy(np.flatnonzero(drawn)).to(device)
    x = scaled_RV[rows]
    k, p, min_p = (
        None if values is None else torch.from_numpy(values[drawn]).to(device) for values in (top_k_R, top_p_R, min_p_R)
    )
    if len(rows) and (k is not None or p is not None or min_p is not None):
        x.masked_fill_(x < thresholds(x, k, p, min_p)[:, None], -torch.inf)
    ids_R[rows] = (x - exponential_noise(seeds_R[drawn], positions_R[drawn], x.shape[1], device).log_()).argmax(-1)
    if keep:
        scaled_RV[rows] = x
        logits_RV.copy_(scaled_RV)
    return ids_R


def score_tokens(
    logits_RV: torch.Tensor, tokens_E: torch.Tensor, lists: TokenLists, chosen_E: np.ndarray, *, logprobs: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of some rows' sampled tokens, and of the best or of given tokens beside them.

    Args:
        logits_RV: not changed.
        tokens_E: int64, the sampled token of each entry's row.
        lists: at least one id per entry. Receives the sampled token as the first, and the tokens of the highest
            logits as the others, highest first and of equals the lowest token first.
        chosen_E: bool, the entry's ids after the first are given instead.
        logprobs: scores are log-probabilities, of a row with a finite maximum; otherwise logits.

    Returns:
        Score of every id, float32 [N], and the sampled tokens' ranks, int64 [E]: how many scores are at least its own.
    """
    scores_N = np.empty(len(lists.ids_N), np.float32)
    ranks_E = np.empty(len(lists.rows_E), np.int64)
    for entry, (row, token) in enumerate(zip(lists.rows_E.tolist(), tokens_E.tolist(), strict=True)):
        clean_V = logits_RV[row].nan_to_num(-torch.inf, torch.inf, -torch.inf)
        x_V = clean_V.log_softmax(-1) if logprobs and bool(clean_V.amax().isfinite()) else clean_V
        span = slice(lists.starts_E1[entry], lists.starts_E1[entry + 1])
        ids = lists.ids_N[span]
        ids[0] = token
        if not chosen_E[entry]:
            order = clean_V.sort(descending=True, stable=True).indices
            ids[1:] = order[: len(ids) - 1].cpu().numpy()
        scores_N[span] = x_V[torch.from_numpy(ids).to(x_V.device)].cpu().numpy()
        ranks_E[entry] = int((x_V >= x_V[token]).sum())
    return scores_N, ranks_E


def keep_only_(logits_RV: torch.Tensor, lists: TokenLists) -> None:
    """Set everything but the listed ids of the listed rows (each named once) to −inf."""
    at = lists.indices(logits_RV.device)
    kept = logits_RV[at]
    logits_RV[torch.from_numpy(lists.rows_E).to(logits_RV.device)] = -torch.inf
    logits_RV[at] = kept


def add_at_(logits_RV: torch.Tensor, lists: TokenLists, values_N: np.ndarray) -> None:
    """Add to each listed id its value (float32); ids are distinct within a row."""
    logits_RV[lists.indices(logits_RV.device)] += torch.from_numpy(values_N).to(logits_RV.device)


def mask_at_(logits_RV: torch.Tensor, lists: TokenLists, *, unless_last: bool = False) -> None:
    """Set the listed ids to −inf; with ``unless_last`` not in rows that would have nothing above −inf left."""
    at = lists.indices(logits_RV.device)
    before = logits_RV[at]
    logits_RV[at] = -torch.inf
    if unless_last:
        emptied_N = ~(logits_RV > -torch.inf).any(-1)[at[0]]
        logits_RV[at] = torch.where(emptied_N, before, -torch.inf)


def penalise_(logits_RV: torch.Tensor, lists: TokenLists, occurrences_N: np.ndarray, scales_E3: np.ndarray) -> None:
    """Repetition on the listed tokens, then frequency and presence on those that occur in the output.

    Args:
        logits_RV: changed in place.
        lists: per row the distinct tokens of prompt and output.
        occurrences_N: int32, how often the output has the token.
        scales_E3: float32, repetition, frequency and presence penalty of each row.
    """
    device = logits_RV.device
    at = lists.indices(device)
    scales_N3 = np.repeat(scales_E3, np.diff(lists.starts_E1), axis=0)
    repetition, frequency, presence = torch.from_numpy(scales_N3.T.copy()).to(device)
    counts = torch.from_numpy(occurrences_N).to(device)
    x = logits_RV[at]
    x = torch.where(x > 0, x / repetition, x * repetition)
    logits_RV[at] = x - frequency * counts - presence * (counts > 0)


def apply_bitmask_(logits_RV: torch.Tensor, rows_E: np.ndarray, words_EW: np.ndarray) -> None:
    """Set the tokens whose bit is 0 to −inf in the given rows (int64).

    ``words_EW`` is int32 with at least ⌈V/32⌉ words per row; token v is bit v % 32 of word v // 32.
    """
    vocab_size = logits_RV.shape[1]
    words = words_EW[:, : math.ceil(vocab_size / 32)]
    bits = (words[:, :, None] >> np.arange(32, dtype=np.int32)) & 1
    banned = torch.from_numpy(bits.reshape(len(words), -1)[:, :vocab_size] == 0).to(logits_RV.device)
    rows = torch.from_numpy(rows_E).to(logits_RV.device)
    logits_RV[rows] = logits_RV[rows].masked_fill_(banned, -torch.inf)
