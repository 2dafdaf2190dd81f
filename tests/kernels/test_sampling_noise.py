"""The noise of a draw is what its definition says, and behaves as independent Exp(1) numbers."""

import numpy as np
import pytest
import torch

from tests.sample.reference import exponential
from vllm_clone.kernels.reference.sampling import exponential_noise

SEEDS = np.array([0, 7, 2**63 + 11, 2**64 - 1], np.uint64)
POSITIONS = np.array([0, 1, 4095, 2**40], np.int64)


def noise_of(seeds, positions, vocab_size):
    arrays = np.asarray(seeds, np.uint64), np.asarray(positions, np.int64)
    return exponential_noise(*arrays, vocab_size, torch.device("cpu"))


@pytest.mark.parametrize("vocab_size", [1, 17, 1003])
def test_noise_follows_the_definition_for_every_seed_position_and_token(vocab_size):
    expected = [
        [exponential(int(s), int(p), v) for v in range(vocab_size)] for s, p in zip(SEEDS, POSITIONS, strict=True)
    ]
    torch.testing.assert_close(noise_of(SEEDS, POSITIONS, vocab_size), torch.tensor(expected), rtol=1e-5, atol=1e-9)


def test_a_row_does_not_depend_on_its_neighbours():
    together = noise_of(SEEDS, POSITIONS, 300)
    assert torch.equal(together[2:3], noise_of(SEEDS[2:3], POSITIONS[2:3], 300))


def test_noise_is_positive_and_finite():
    noise = noise_of(range(64), range(64), 50_000)
    assert bool((noise > 0).all())
    assert bool(noise.isfinite().all())


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_exponential_along_every_axis(axis):
    n = 40_000
    if axis == "token":
        noise = noise_of([3], [5], n).flatten()
    elif axis == "position":
        noise = noise_of(np.full(n, 3), np.arange(n), 8)[:, 5]
    else:
        noise = noise_of(np.arange(n), np.full(n, 5), 8)[:, 5]
    # 20 bins of equal probability: chi-square with 19 degrees of freedom is below 43.8 in 99.9 % of cases.
    bins = torch.bucketize(1 - (-noise).exp(), torch.linspace(0, 1, 21)[1:-1])
    counts = torch.bincount(bins, minlength=20).double()
    assert float(((counts - n / 20) ** 2 / (n / 20)).sum()) < 43.8


def test_neighbouring_positions_tokens_and_seeds_are_uncorrelated():
    n = 512
    base = 1 - (-noise_of(np.full(n, 9), np.arange(n), n)).exp()
    other_seed = 1 - (-noise_of(np.full(n, 10), np.arange(n), n)).exp()
    for a, b in (
        (base[:-1], base[1:]),
        (base[:, :-1], base[:, 1:]),
        (base[:-1, 1:], base[1:, :-1]),
        (base, other_seed),
    ):
        r = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(float(r)) < 5 / n  # 5 standard deviations of n² independent pairs
