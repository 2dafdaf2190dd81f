"""min-p, top-k and top-p: what both implementations leave to draw from, against the definition."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sample.reference import survivors
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops


@pytest.fixture(params=["reference", *ops.available_levels()])
def kept_by(request: pytest.FixtureRequest) -> Iterator:
    """Tokens of each row that survive the filters, by plain torch and by each instruction set."""
    before = ops.active_level()
    if request.param != "reference":
        ops.use_level(request.param)
    sample_tokens = (reference if request.param == "reference" else ops).sample_tokens

    def kept(x, k=None, p=None, min_prob=None):
        rows = len(x)
        left = x.clone()
        arrays = (
            None if values is None else np.array(values, dtype)
            for values, dtype in ((k, np.int64), (p, np.float32), (min_prob, np.float32))
        )
        zeros = np.zeros(rows, np.int64)
        ids = sample_tokens(left, np.ones(rows, np.float32), *arrays, zeros.astype(np.uint64), zeros, keep=True)
        survivors = left > -torch.inf
        assert bool(survivors[torch.arange(rows), ids].all())
        assert torch.equal(left[survivors], x[survivors])
        return [set(row.nonzero().flatten().tolist()) for row in survivors]

    yield kept
    ops.use_level(before)


def test_top_p_example_of_the_semantics(kept_by):
    x = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept_by(x, p=[0.8]) == [{0, 1}]


def test_top_k_keeps_ties_with_the_kth(kept_by):
    x = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert kept_by(x, k=[2]) == [{1, 2, 3}]


def test_top_p_keeps_ties_with_the_last_survivor(kept_by):
    assert kept_by(torch.zeros(1, 4), p=[0.5]) == [{0, 1, 2, 3}]


def test_the_likeliest_token_always_survives(kept_by):
    x = torch.tensor([[0.0, 9.0, 1.0]])
    assert kept_by(x, k=[1], p=[1e-6], min_prob=[1.0]) == [{1}]


def test_k_off_or_beyond_the_vocabulary_drops_nothing(kept_by):
    x = torch.randn(3, 10)
    assert kept_by(x, k=[0, 10, 99]) == [set(range(10))] * 3


def test_top_p_counts_mass_after_top_k(kept_by):
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of {0.4, 0.3} alone the first holds 57 % of the mass, so p = 0.5 keeps one; of all four it would keep two.
    assert kept_by(x, k=[2], p=[0.5]) == [{0}]
    assert kept_by(x, k=[0], p=[0.5]) == [{0, 1}]


def test_top_p_counts_mass_after_min_p(kept_by):
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept_by(x, p=[0.75]) == [{0, 1, 2}]
    assert kept_by(x, p=[0.55], min_prob=[0.7]) == [{0}]


def test_ties_with_the_kth_weigh_nothing_whoever_shares_the_batch(kept_by):
    x = torch.tensor([[3.0, 2.0, 2.0, 2.0, 0.0]])
    # Of e against 1, the first token holds 73 %; the tied tokens beyond k would lower its share.
    assert kept_by(x, k=[2], p=[0.7]) == [{0}]
    assert kept_by(x.expand(2, -1), k=[2, 4], p=[0.7, 1.0])[0] == {0}


row_filters = st.tuples(
    st.sampled_from([0, 1, 2, 5, 40, 400, 5000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 0.01]),
    st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(row_filters, min_size=1, max_size=5), st.sampled_from([0.1, 1.0, 4.0]), st.integers(0, 2**31))
def test_any_mix_of_rows_keeps_what_each_row_alone_would(kept_by, filters, spread, seed):
    x = torch.randn(len(filters), 700, generator=torch.Generator().manual_seed(seed)) * spread
    ks, ps, min_ps = (list(column) for column in zip(*filters, strict=True))
    got = kept_by(x, ks, ps, min_ps)
    for row, (k, p, min_prob), kept in zip(x.tolist(), filters, got, strict=True):
        expected = survivors(row, k=k, p=p, min_prob=min_prob)
        # float32 sums may decide a token on the very edge the other way.
        assert len(expected ^ kept) <= 1


@pytest.mark.parametrize("p", [0.3, 0.9, 0.9999])
def test_a_nucleus_of_thousands_is_found_exactly(kept_by, p):
    x = torch.randn(3, 20_000)
    probs, order = x.double().softmax(-1).sort(descending=True)
    wanted = (probs.cumsum(-1) - probs < p).sum(-1)
    for kept, n, ids in zip(kept_by(x, p=[p] * 3), wanted.tolist(), order, strict=True):
        assert n > 256
        assert abs(len(kept) - n) <= 2
        assert kept == set(ids[: len(kept)].tolist())


@pytest.mark.parametrize("p", [1e-300, 5e-324, 1e-40, 1e-7])
def test_a_p_that_float32_cannot_hold_keeps_the_likeliest_token(kept_by, p):
    x = torch.tensor([[0.0, 9.0, 1.0], [3.0, 0.0, 2.0]])
    assert kept_by(x, p=[p, 0.9]) == [{1}, {0, 2}]
    assert kept_by(x, p=[p, p]) == [{1}, {0}]
    assert kept_by(x, p=[p, p], min_prob=[0.5, 0.5]) == [{1}, {0}]
    assert kept_by(x, k=[2, 0], p=[p, p]) == [{1}, {0}]


def test_p_of_0_and_1_keep_one_token_and_all(kept_by):
    x = torch.randn(2, 300)
    assert kept_by(x, p=[0.0, 1.0]) == [{int(x[0].argmax())}, set(range(300))]


def test_fewer_finite_scores_than_k_all_survive(kept_by):
    x = torch.full((2, 200), -torch.inf)
    x[:, [3, 150, 199]] = torch.tensor([1.0, 2.0, 3.0])
    assert kept_by(x, k=[5, 2]) == [{3, 150, 199}, {150, 199}]
    # Of e² against e and 1 the first holds 67 % of the mass, the first two 91 %.
    assert kept_by(x, k=[5, 3], p=[0.6, 0.8]) == [{199}, {150, 199}]
