"""Noise that is a pure function of (seed, position, token id), so that who shares a batch never changes a draw.

A 64-bit mix of seed and position gives each row two 32-bit keys; a 32-bit counter hash of the token id under
those keys gives the bits. Only 32-bit wrapping multiplications, additions, shifts and exclusive-ors are used on
the vocabulary axis, so a compiled kernel can produce the same bits. R rows, V vocabulary, N (row, token) pairs.
"""

from functools import lru_cache

import numpy as np
import torch

_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)
_MIX_64_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_64_B = np.uint64(0x94D049BB133111EB)
_STRIDE = 0x9E3779B1
_MIX_32_A = 0x7FEB352D
_MIX_32_B = 0x846CA68B
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _signed(value: int) -> int:
    """The int32 with the same bits as an unsigned 32-bit value."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix_64(x_R: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser of (x + golden ratio), modulo 2**64."""
    x_R = x_R + _GOLDEN_64
    x_R = (x_R ^ (x_R >> np.uint64(30))) * _MIX_64_A
    x_R = (x_R ^ (x_R >> np.uint64(27))) * _MIX_64_B
    return x_R ^ (x_R >> np.uint64(31))


def row_keys(seeds_R: np.ndarray, positions_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two int32 keys per row from its seed (uint64) and the position (int64) of its input token."""
    mixed_R = _mix_64(_mix_64(seeds_R) ^ positions_R.astype(np.uint64))
    return mixed_R.astype(np.uint32).view(np.int32), (mixed_R >> np.uint64(32)).astype(np.uint32).view(np.int32)


@lru_cache(maxsize=2)
def _strided_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    ids_V = torch.arange(vocab_size, dtype=torch.int64, device=device)
    return ids_V.mul_(_signed(_STRIDE)).to(torch.int32)


def _xor_shift_(h: torch.Tensor, bits: int) -> None:
    """h ^= h >> bits with a logical shift, in place."""
    h ^= (h >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _exponential_(h: torch.Tensor, late_key: torch.Tensor) -> torch.Tensor:
    """Finish the hash of ``h`` (int32, destroyed) and map it to Exp(1): float32, finite and above 0.

    The 31-bit uniform u keeps its resolution near 0, because small exponentials are what wins draws.
    """
    _xor_shift_(h, 16)
    h *= _MIX_32_A
    _xor_shift_(h, 15)
    h += late_key
    h *= _signed(_MIX_32_B)
    _xor_shift_(h, 16)
    h &= 0x7FFFFFFF
    u = h.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
    return u.neg_().log1p_().neg_()


def exponential_rows(key_a_R: torch.Tensor, key_b_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exp(1) noise for every token of every row, float32 [R, V]; keys as from :func:`row_keys`."""
    h_RV = _strided_ids(vocab_size, key_a_R.device) + key_a_R[:, None]
    return _exponential_(h_RV, key_b_R[:, None])


def exponential_at(key_a_N: torch.Tensor, key_b_N: torch.Tensor, token_ids_N: torch.Tensor) -> torch.Tensor:
    """The same noise for single (row, token) pairs, float32 [N]; keys are given per pair."""
    h_N = (token_ids_N * _signed(_STRIDE)).to(torch.int32)
    h_N += key_a_N
    return _exponential_(h_N, key_b_N)
