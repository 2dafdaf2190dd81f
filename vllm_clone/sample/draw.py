"""Choosing one token per row: greedy, or the Gumbel-max draw. R rows, V vocabulary, N surviving candidates."""

import torch

from vllm_clone.sample.noise import exponential_at, exponential_rows

_BLOCK_ELEMENTS = 1 << 18
"""Dense noise is made for so many scores at a time, which keeps its dozen passes inside the cache."""


def argmax_rows(x_RV: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest value, int64 [R]; the lowest index on ties."""
    if x_RV.device.type == "cpu":  # numpy's argmax is vectorised, torch's is not: 3 against 42 µs for 49,152 values
        return torch.from_numpy(x_RV.numpy().argmax(-1))
    return x_RV.argmax(-1)


def draw_dense(x_RV: torch.Tensor, key_a_R: torch.Tensor, key_b_R: torch.Tensor) -> torch.Tensor:
    """One token per row with probability softmax(x), int64 [R]: the argmax of x − ln E with E ~ Exp(1)."""
    num_rows, vocab_size = x_RV.shape
    step = max(1, _BLOCK_ELEMENTS // vocab_size)
    parts = []
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        noise = exponential_rows(key_a_R[rows], key_b_R[rows], vocab_size).log_()
        parts.append(argmax_rows(torch.sub(x_RV[rows], noise, out=noise)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def draw_above(
    x_RV: torch.Tensor, threshold_R: torch.Tensor, key_a_R: torch.Tensor, key_b_R: torch.Tensor
) -> torch.Tensor:
    """:func:`draw_dense` among the values that reach the row's threshold; noise is made for those alone.

    Every row must have such a value.
    """
    num_rows, vocab_size = x_RV.shape
    rows_N, tokens_N = (x_RV >= threshold_R[:, None]).nonzero(as_tuple=True)
    if len(rows_N) > num_rows * vocab_size // 8:  # gathering so many pairs costs more than it saves
        return draw_dense(x_RV.masked_fill(x_RV < threshold_R[:, None], -torch.inf), key_a_R, key_b_R)
    noise_N = exponential_at(key_a_R[rows_N], key_b_R[rows_N], tokens_N)
    score_N = x_RV[rows_N, tokens_N].sub_(noise_N.log_())
    best_R = score_N.new_full((num_rows,), -torch.inf).scatter_reduce_(0, rows_N, score_N, "amax")
    won_N = score_N == best_R[rows_N]
    # Of equal scores the lowest token wins, as argmax has it.
    ids_R = torch.full((num_rows,), vocab_size - 1, dtype=torch.int64, device=x_RV.device)
    return ids_R.scatter_reduce_(0, rows_N[won_N], tokens_N[won_N], "amin")
