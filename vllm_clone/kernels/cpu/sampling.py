"""The CPU extension's sampling kernels; meanings as in :mod:`vllm_clone.kernels.reference.sampling`.

Wrong shapes, strides and dtypes raise ValueError, as do listed token ids outside the vocabulary. Row numbers are
trusted.
"""

import numpy as np
import torch

import vllm_clone.kernels.cpu._C as _C
from vllm_clone.kernels.cpu.checks import require as _require
from vllm_clone.kernels.reference.sampling import TokenLists

_KEEP_ONLY, _ADD, _MASK, _MASK_UNLESS_LAST, _PENALISE = range(5)
_MAX_VOCAB = 1 << 21
"""So many probability masses have a sum that an int64 holds."""


def _check_logits(logits_RV: torch.Tensor) -> tuple[int, int]:
    """R and V."""
    _require(
        logits_RV.dtype == torch.float32 and logits_RV.is_cpu and logits_RV.dim() == 2 and logits_RV.stride(1) == 1,
        "sampling: logits must be float32 [R, V] on the CPU with contiguous rows",
    )
    rows, vocab = logits_RV.shape
    _require(0 < vocab <= _MAX_VOCAB, f"sampling: the vocabulary must have 1 to {_MAX_VOCAB} tokens")
    return rows, vocab


def _address(array: np.ndarray | None, dtype: type, *shape: int) -> int:
    """Where an array's numbers lie; 0 for None."""
    if array is None:
        return 0
    _require(
        array.dtype == dtype and array.shape == shape and array.flags.c_contiguous,
        f"sampling: contiguous {dtype.__name__} of shape {shape} expected",
    )
    return array.ctypes.data


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
    rows, vocab = _check_logits(logits_RV)
    ids_R = torch.empty(rows, dtype=torch.int64)
    arrays = (0, 0, 0, 0, 0, 0)
    if temperature_R is not None:
        _require(seeds_R is not None and positions_R is not None, "sample_tokens: draws need seeds and positions")
        arrays = (
            _address(temperature_R, np.float32, rows),
            _address(top_k_R, np.int64, rows),
            _address(top_p_R, np.float32, rows),
            _address(min_p_R, np.float32, rows),
            _address(seeds_R, np.uint64, rows),
            _address(positions_R, np.int64, rows),
        )
    _C.sample_tokens(ids_R.data_ptr(), logits_RV.data_ptr(), *arrays, rows, vocab, logits_RV.stride(0), keep)
    return ids_R


def _list_addresses(lists: TokenLists) -> tuple[int, int, int]:
    entries, total = len(lists.rows_E), len(lists.ids_N)
    starts = lists.starts_E1
    addresses = (
        _address(lists.rows_E, np.int64, entries),
        _address(starts, np.int64, entries + 1),
        _address(lists.ids_N, np.int64, total),
    )
    _require(
        starts[0] == 0 and starts[-1] == total and bool((starts[1:] >= starts[:-1]).all()),
        "sampling: the lists must span all ids in turn",
    )
    return addresses


def score_tokens(
    logits_RV: torch.Tensor, tokens_E: torch.Tensor, lists: TokenLists, chosen_E: np.ndarray, *, logprobs: bool
) -> tuple[np.ndarray, np.ndarray]:
    _, vocab = _check_logits(logits_RV)
    entries, total = len(lists.rows_E), len(lists.ids_N)
    _require(
        tokens_E.dtype == torch.int64 and tokens_E.shape == (entries,) and tokens_E.is_contiguous(),
        "score_tokens: one contiguous int64 token per row expected",
    )
    rows, starts, ids = _list_addresses(lists)
    lengths = np.diff(lists.starts_E1)
    _require(bool(((lengths > 0) & ((lengths <= vocab + 1) | chosen_E)).all()), "score_tokens: 1 to V + 1 ids a row")
    scores_N, ranks_E = np.empty(total, np.float32), np.empty(entries, np.int64)
    inside = _C.score_tokens(
        logits_RV.data_ptr(), rows, tokens_E.data_ptr(), starts, _address(chosen_E, np.bool_, entries), ids,
        scores_N.ctypes.data, ranks_E.ctypes.data, entries, vocab, logits_RV.stride(0), logprobs,
    )  # fmt: skip
    _require(inside, "score_tokens: a token id is outside the vocabulary")
    return scores_N, ranks_E


def _edit(kind: int, logits_RV: torch.Tensor, lists: TokenLists, values: int = 0, occurrences: int = 0) -> None:
    _, vocab = _check_logits(logits_RV)
    rows, starts, ids = _list_addresses(lists)
    inside = _C.edit_logits(
        kind, logits_RV.data_ptr(), rows, starts, ids, values, occurrences, len(lists.rows_E), vocab,
        logits_RV.stride(0),
    )  # fmt: skip
    _require(inside, "sampling: a token id is outside the vocabulary")


def keep_only_(logits_RV: torch.Tensor, lists: TokenLists) -> None:
    _edit(_KEEP_ONLY, logits_RV, lists)


def add_at_(logits_RV: torch.Tensor, lists: TokenLists, values_N: np.ndarray) -> None:
    _edit(_ADD, logits_RV, lists, _address(values_N, np.float32, len(lists.ids_N)))


def mask_at_(logits_RV: torch.Tensor, lists: TokenLists, *, unless_last: bool = False) -> None:
    _edit(_MASK_UNLESS_LAST if unless_last else _MASK, logits_RV, lists)


def penalise_(logits_RV: torch.Tensor, lists: TokenLists, occurrences_N: np.ndarray, scales_E3: np.ndarray) -> None:
    scales = _address(scales_E3, np.float32, len(lists.rows_E), 3)
    _edit(_PENALISE, logits_RV, lists, scales, _address(occurrences_N, np.int32, len(lists.ids_N)))


def apply_bitmask_(logits_RV: torch.Tensor, rows_E: np.ndarray, words_EW: np.ndarray) -> None:
    _, vocab = _check_logits(logits_RV)
    entries, width = len(rows_E), words_EW.shape[-1]
    _require(32 * width >= vocab, "apply_bitmask: a bit for every token expected")
    _C.apply_bitmask(
        logits_RV.data_ptr(), _address(rows_E, np.int64, entries), _address(words_EW, np.int32, entries, width),
        entries, vocab, logits_RV.stride(0), width,
    )  # fmt: skip
