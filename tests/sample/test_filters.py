import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sample.reference import survivors
from vllm_clone.sample.filters import thresholds


def kept_by(x, k=None, p=None, min_prob=None):
    t = thresholds(
        x,
        None if k is None else torch.tensor(k),
        None if p is None else torch.tensor(p),
        None if min_prob is None else torch.tensor(min_prob),
    )
    return [set(row.nonzero().flatten().tolist()) for row in x >= t[:, None]]


def test_top_p_example_of_the_semantics():
    x = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept_by(x, p=[0.8]) == [{0, 1}]


def test_top_k_keeps_ties_with_the_kth():
    x = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert kept_by(x, k=[2]) == [{1, 2, 3}]


def test_top_p_keeps_ties_with_the_last_survivor():
    assert kept_by(torch.zeros(1, 4), p=[0.5]) == [{0, 1, 2, 3}]


def test_the_likeliest_token_always_survives():
    x = torch.tensor([[0.0, 9.0, 1.0]])
    assert kept_by(x, k=[1], p=[1e-6], min_prob=[1.0]) == [{1}]


def test_k_off_or_beyond_the_vocabulary_drops_nothing():
    x = torch.randn(3, 10)
    assert kept_by(x, k=[0, 10, 99]) == [set(range(10))] * 3


def test_top_p_counts_mass_after_top_k():
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of {0.4, 0.3} alone the first holds 57 % of the mass, so p = 0.5 keeps one; of all four it would keep two.
    assert kept_by(x, k=[2], p=[0.5]) == [{0}]
    assert kept_by(x, k=[0], p=[0.5]) == [{0, 1}]


def test_top_p_counts_mass_after_min_p():
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept_by(x, p=[0.75]) == [{0, 1, 2}]
    assert kept_by(x, p=[0.55], min_prob=[0.7]) == [{0}]


def test_ties_with_the_kth_weigh_nothing_whoever_shares_the_batch():
    x = torch.tensor([[3.0, 2.0, 2.0, 2.0, 0.0]])
    # Of e against 1, the first token holds 73 %; the tied tokens beyond k would lower its share.
    assert kept_by(x, k=[2], p=[0.7]) == [{0}]
    assert kept_by(x.expand(2, -1), k=[2, 4], p=[0.7, 1.0])[0] == {0}


row_filters = st.tuples(
    st.sampled_from([0, 1, 2, 5, 40, 400, 5000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 0.01]),
    st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(row_filters, min_size=1, max_size=5), st.sampled_from([0.1, 1.0, 4.0]), st.integers(0, 2**31))
def test_any_mix_of_rows_keeps_what_each_row_alone_would(filters, spread, seed):
    x = torch.randn(len(filters), 700, generator=torch.Generator().manual_seed(seed)) * spread
    ks, ps, min_ps = (list(column) for column in zip(*filters, strict=True))
    got = kept_by(x, ks, ps, min_ps)
    for row, (k, p, min_prob), kept in zip(x.tolist(), filters, got, strict=True):
        expected = survivors(row, k=k, p=p, min_prob=min_prob)
        # float32 sums may decide a token on the very edge the other way.
        assert len(expected ^ kept) <= 1


@pytest.mark.parametrize("p", [0.3, 0.9, 0.9999])
def test_a_nucleus_of_thousands_is_found_exactly(p):
    x = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(1))
    probs, order = x.double().softmax(-1).sort(descending=True)
    wanted = (probs.cumsum(-1) - probs < p).sum(-1)
    for kept, n, ids in zip(kept_by(x, p=[p] * 3), wanted.tolist(), order, strict=True):
        assert n > 256
        assert abs(len(kept) - n) <= 2
        assert kept == set(ids[: len(kept)].tolist())


@pytest.mark.parametrize("p", [1e-300, 5e-324, 1e-40, 1e-7])
def test_a_p_that_float32_cannot_hold_keeps_the_likeliest_token(p: float):
    x = torch.tensor([[0.0, 9.0, 1.0], [3.0, 0.0, 2.0]])
    assert kept_by(x, p=[p, 0.9]) == [{1}, {0, 2}]
    assert kept_by(x, p=[p, p]) == [{1}, {0}]
    assert kept_by(x, p=[p, p], min_prob=[0.5, 0.5]) == [{1}, {0}]
    assert kept_by(x, k=[2, 0], p=[p, p]) == [{1}, {0}]
