"""The sampling kernels give what plain torch gives, on every instruction set bit for bit the same."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.helpers import strided_rows
from vllm_clone.kernels import TokenLists, reference
from vllm_clone.kernels.cpu import ops

NAN, INF = float("nan"), float("inf")
VOCABS = [1, 2, 17, 64, 65, 700, 49_152]


def ties(x: torch.Tensor) -> torch.Tensor:
    return x.round()


def mostly_masked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.rand(x.shape) < 0.9, -INF)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x * 1e-3


def steep(x: torch.Tensor) -> torch.Tensor:
    return x * 40


SHAPES = [torch.clone, ties, mostly_masked, flat, steep]


def random_filters(rows: int, vocab: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Parameters of rows that use any of the filters, or are greedy."""
    return {
        "temperature_R": rng.choice([0.0, 0.3, 1.0, 1.7], rows).astype(np.float32),
        "top_k_R": rng.choice([0, 0, 1, 2, 40, vocab - 1, vocab, vocab + 7], rows),
        "top_p_R": rng.choice([1.0, 1.0, 0.9999, 0.95, 0.5, 0.01, 0.0], rows).astype(np.float32),
        "min_p_R": rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], rows).astype(np.float32),
        "seeds_R": rng.integers(0, 2**64, rows, np.uint64),
        "positions_R": rng.integers(0, 2**40, rows),
    }


@pytest.fixture(params=ops.available_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in use. Emulated matrix tiles have no part in sampling."""
    before = ops.active_level()
    ops.use_level(request.param)
    yield request.param
    ops.use_level(before)


def on_every_level(run: Callable[[], Any]) -> dict[str, Any]:
    """What a call gives on each instruction set; leaves the choice as it was."""
    before, results = ops.active_level(), {}
    for name in ops.available_levels():
        ops.use_level(name)
        results[name] = run()
    ops.use_level(before)
    return results


@pytest.mark.usefixtures("level")
class TestTokens:
    @pytest.mark.parametrize("vocab", VOCABS)
    def test_greedy_rows_take_the_lowest_token_of_the_highest_score(self, vocab):
        logits = ties(torch.randn(9, vocab) * 2)
        assert torch.equal(ops.sample_tokens(logits), reference.sample_tokens(logits))

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)
    @pytest.mark.parametrize("vocab", VOCABS)
    @pytest.mark.parametrize("keep", [False, True])
    def test_any_mix_of_rows_draws_as_plain_torch_does(self, vocab, shape, keep):
        rows = 24 if vocab > 10_000 else 64
        logits = shape(torch.randn(rows, vocab) * 3)
        params = random_filters(rows, vocab, np.random.default_rng(vocab))
        left, expected_left = logits.clone(), logits.clone()
        ids = ops.sample_tokens(left, **params, keep=keep)
        assert torch.equal(ids, reference.sample_tokens(expected_left, **params, keep=keep))
        if not keep:
            assert torch.equal(left, logits)
            return
        # The sums of float32 exponentials may decide a token on the very edge of top-p the other way.
        differences = (left != expected_left).sum(-1)
        assert int(differences.max()) <= 1
        assert int(differences.count_nonzero()) <= 1

    def test_unused_filters_may_be_left_out(self):
        logits = torch.randn(8, 300) * 3
        params = random_filters(8, 300, np.random.default_rng(1))
        off = params | {"top_k_R": np.zeros(8, np.int64), "top_p_R": np.ones(8, np.float32)}
        without = params | {"top_k_R": None, "top_p_R": None}
        assert torch.equal(ops.sample_tokens(logits, **without), ops.sample_tokens(logits, **off))

    def test_a_row_draws_the_same_in_any_company_and_on_any_number_of_threads(self, threads):
        logits = torch.randn(10, 49_152) * 3
        params = random_filters(10, 49_152, np.random.default_rng(2))
        together = ops.sample_tokens(logits, **params).tolist()
        for count in (1, 2, 3):
            ops.set_num_threads(count)
            assert ops.sample_tokens(logits, **params).tolist() == together
            for row, token in enumerate(together):
                alone = {name: values[row : row + 1] for name, values in params.items()}
                assert ops.sample_tokens(logits[row : row + 1], **alone).tolist() == [token]

    def test_threads_that_share_a_row_leave_what_one_leaves(self, threads):
        logits = torch.randn(1, 49_152) * 3
        params = random_filters(1, 49_152, np.random.default_rng(2)) | {
            "temperature_R": np.array([0.7], np.float32), "top_k_R": np.array([50]),
        }  # fmt: skip
        left = []
        for count in (1, 2):
            ops.set_num_threads(count)
            left.append(logits.clone())
            ops.sample_tokens(left[-1], **params, keep=True)
        assert torch.equal(*left)

    def test_rows_may_lie_apart(self):
        logits = strided_rows(6, 100, torch.float32)
        params = random_filters(6, 100, np.random.default_rng(3))
        assert torch.equal(ops.sample_tokens(logits, **params), reference.sample_tokens(logits, **params))
        assert torch.equal(ops.sample_tokens(logits), logits.argmax(-1))

    def test_nan_counts_as_minus_infinity(self):
        logits = torch.randn(40, 130) * 3
        clean = logits.masked_fill(torch.rand(40, 130) < 0.3, -INF)
        logits[clean == -INF] = NAN
        params = random_filters(40, 130, np.random.default_rng(4))
        assert torch.equal(ops.sample_tokens(logits), ops.sample_tokens(clean))
        assert torch.equal(ops.sample_tokens(logits, **params), ops.sample_tokens(clean, **params))

    @pytest.mark.parametrize("score", [-INF, NAN])
    @pytest.mark.parametrize("vocab", [1, 5, 200, 49_152])
    def test_a_row_without_a_score_gives_token_0(self, vocab, score):
        params = random_filters(20, vocab, np.random.default_rng(5))
        assert ops.sample_tokens(torch.full((20, vocab), score), **params).tolist() == [0] * 20

    def test_an_infinite_score_wins(self):
        logits = torch.randn(20, 90)
        logits[:, [40, 70]] = INF
        params = random_filters(20, 90, np.random.default_rng(6))
        assert ops.sample_tokens(logits, **params).tolist() == [40] * 20

    def test_no_rows_give_no_tokens(self):
        params = random_filters(0, 90, np.random.default_rng(6))
        assert ops.sample_tokens(torch.empty(0, 90), **params).tolist() == []

    @pytest.mark.parametrize("filters", [{}, {"top_k_R": 200}, {"top_p_R": 0.9}, {"min_p_R": 0.01}])
    def test_draws_from_a_large_vocabulary_follow_the_distribution(self, filters):
        n, vocab = 4_000, 49_152
        row = torch.randn(1, vocab) * 3
        dtypes = {"top_k_R": np.int64, "top_p_R": np.float32, "min_p_R": np.float32}
        left = row.clone()
        arrays = {name: np.full(n, value, dtypes[name]) for name, value in filters.items()}
        ones, positions = np.ones(n, np.float32), np.arange(n)
        one = {name: values[:1] for name, values in arrays.items()}
        reference.sample_tokens(
            left, ones[:1], **one, seeds_R=np.zeros(1, np.uint64), positions_R=positions[:1], keep=True
        )
        drawn = ops.sample_tokens(
            row.expand(n, vocab), ones, **arrays, seeds_R=np.full(n, 11, np.uint64), positions_R=positions
        )
        probs, order = left[0].double().softmax(-1).sort(descending=True)
        # Sixteen groups of about the same mass, from the likeliest tokens to the least likely.
        group = torch.empty(vocab, dtype=torch.int64)
        group[order] = ((probs.cumsum(0) - probs) * 16).long().clamp_(max=15)
        mass = torch.zeros(16, dtype=torch.float64).scatter_add_(0, group[order], probs)
        counts = torch.bincount(group[drawn], minlength=16)
        assert bool((left[0, drawn] > -INF).all())
        used = mass > 0
        # Chi-square with at most 15 degrees of freedom is below 37.7 in 99.9 % of cases.
        assert float(((counts[used] - n * mass[used]) ** 2 / (n * mass[used])).sum()) < 37.7


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 300), st.integers(1, 6), st.sampled_from(SHAPES), st.sampled_from([0.1, 1.0, 6.0]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_every_level_gives_the_same_tokens_and_leaves_the_same_scores(vocab, rows, shape, spread, seed):
    torch.manual_seed(seed)
    logits = shape(torch.randn(rows, vocab) * spread)
    params = random_filters(rows, vocab, np.random.default_rng(seed))

    def run() -> tuple[list[int], torch.Tensor]:
        left = logits.clone()
        return ops.sample_tokens(left, **params, keep=True).tolist(), left

    results = on_every_level(run)
    expected_ids, expected_left = results.pop("portable")
    for ids, left in results.values():
        assert ids == expected_ids
        assert torch.equal(left, expected_left)
    assert reference.sample_tokens(logits.clone(), **params).tolist() == expected_ids


def lists_of(rows: list[int], ids: list[list[int]]) -> TokenLists:
    starts = np.cumsum([0, *map(len, ids)])
    return TokenLists(np.array(rows), starts, np.array([i for part in ids for i in part], np.int64))


def score(module: Any, logits: torch.Tensor, tokens: list[int], ids: list[list[int] | int], logprobs: bool) -> Any:
    """Ids, scores and ranks; ``ids`` gives for each row the others' number, or which they are."""
    chosen = np.array([isinstance(others, list) for others in ids])
    whole = [[-1] * (1 + others) if isinstance(others, int) else [-1, *others] for others in ids]
    lists = lists_of(list(range(len(tokens))), whole)
    scores, ranks = module.score_tokens(logits, torch.tensor(tokens), lists, chosen, logprobs=logprobs)
    return lists.ids_N.tolist(), scores, ranks.tolist()


@pytest.mark.usefixtures("level")
class TestScores:
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)
    @pytest.mark.parametrize("vocab", VOCABS)
    @pytest.mark.parametrize("logprobs", [False, True])
    def test_scores_are_those_of_plain_torch(self, vocab, shape, logprobs):
        logits = shape(torch.randn(7, vocab) * 3)
        if vocab > 1:
            logits[4, 0] = NAN
        tokens = torch.randint(0, vocab, (7,)).tolist()
        given = torch.randint(0, vocab, (9,)).tolist()
        wishes = [0, min(5, vocab), given, min(20, vocab), min(300, vocab), vocab, []]
        ids, scores, ranks = score(ops, logits, tokens, wishes, logprobs)
        expected_ids, expected, expected_ranks = score(reference, logits, tokens, wishes, logprobs)
        assert ids == expected_ids
        finite = np.isfinite(expected)
        np.testing.assert_allclose(scores[finite], expected[finite], rtol=1e-6, atol=1e-5 if logprobs else 0)
        assert np.array_equal(scores[~finite], expected[~finite])
        # A sum that differs in its last bit may round two close log-probabilities to one.
        assert np.abs(np.subtract(ranks, expected_ranks)).max() <= (max(2, vocab // 1000) if logprobs else 0)

    def test_probabilities_sum_to_one(self):
        logits = torch.randn(3, 49_152) * 4
        _, scores, _ = score(ops, logits, [0, 1, 2], [49_152] * 3, True)
        sums = np.exp(scores.astype(np.float64)).reshape(3, -1)[:, 1:].sum(-1)
        np.testing.assert_allclose(sums, 1, rtol=1e-6)

    def test_ties_are_listed_from_the_lowest_token_and_all_count_in_the_rank(self):
        logits = torch.zeros(1, 100)
        logits[0, [7, 70, 93]] = 1.0
        ids, _, ranks = score(ops, logits, [70], [5], True)
        assert ids == [70, 7, 70, 93, 0, 1]
        assert ranks == [3]

    def test_a_row_without_a_score_has_minus_infinity_only(self):
        ids, scores, _ = score(ops, torch.full((1, 40), -INF), [3], [2], True)
        assert ids == [3, 0, 1]
        assert scores.tolist() == [-INF] * 3

    def test_rows_may_lie_apart_and_come_in_any_order(self):
        logits = strided_rows(5, 90, torch.float32)
        lists, expected = (TokenLists(np.array([4, 0]), np.array([0, 4, 6]), np.zeros(6, np.int64)) for _ in range(2))
        tokens, chosen = torch.tensor([2, 3]), np.zeros(2, np.bool_)
        scores, ranks = ops.score_tokens(logits, tokens, lists, chosen, logprobs=False)
        expected_scores, expected_ranks = reference.score_tokens(logits, tokens, expected, chosen, logprobs=False)
        assert lists.ids_N.tolist() == expected.ids_N.tolist()
        assert scores.tolist() == expected_scores.tolist()
        assert ranks.tolist() == expected_ranks.tolist()


def test_every_level_gives_the_same_scores():
    torch.manual_seed(3)
    logits = torch.randn(8, 5_003) * 4
    results = on_every_level(lambda: score(ops, logits, list(range(8)), [300] * 8, True))
    expected_ids, expected_scores, expected_ranks = results.pop("portable")
    for ids, scores, ranks in results.values():
        assert ids == expected_ids
        assert np.array_equal(scores, expected_scores)
        assert ranks == expected_ranks


@pytest.fixture
def edited(level: str) -> Callable[..., None]:
    """Checks that an edit does to some logits what plain torch does."""

    def check(name: str, *args: Any, vocab: int, mask: bool = False, **kwargs: Any) -> None:
        actual = strided_rows(12, vocab, torch.float32)
        actual.mul_(3)
        if mask:
            actual[:, 1:] = -INF
        expected = actual.clone()
        getattr(ops, name)(actual, *args, **kwargs)
        getattr(reference, name)(expected, *args, **kwargs)
        assert torch.equal(actual, expected)

    return check


@pytest.mark.parametrize("vocab", [1, 33, 700, 49_152])
class TestEdits:
    ROWS = [7, 0, 11, 3]

    def lists(self, vocab: int) -> TokenLists:
        rng = np.random.default_rng(vocab)
        return lists_of(self.ROWS, [rng.permutation(vocab)[:n].tolist() for n in (1, 40, 500, 0)])

    def test_only_the_listed_ids_are_kept(self, edited, vocab):
        edited("keep_only_", self.lists(vocab), vocab=vocab)

    def test_values_are_added(self, edited, vocab):
        lists = self.lists(vocab)
        values = np.random.default_rng(1).normal(0, 3, len(lists.ids_N)).astype(np.float32)
        edited("add_at_", lists, values, vocab=vocab)

    def test_ids_are_masked(self, edited, vocab):
        edited("mask_at_", self.lists(vocab), vocab=vocab)

    @pytest.mark.parametrize("mask", [False, True])
    def test_ids_are_masked_unless_nothing_else_is_left(self, edited, vocab, mask):
        edited("mask_at_", lists_of([2, 5], [[0], [vocab - 1]]), vocab=vocab, mask=mask, unless_last=True)

    def test_penalties(self, edited, vocab):
        lists = self.lists(vocab)
        rng = np.random.default_rng(2)
        counts = rng.choice([0, 0, 1, 7], len(lists.ids_N)).astype(np.int32)
        scales = np.array([[1.3, 0, 0], [0.7, 0.4, -1.1], [1, -0.9, 2], [2, 2, 2]], np.float32)
        edited("penalise_", lists, counts, scales, vocab=vocab)

    @pytest.mark.parametrize("share", [0.0, 0.02, 0.9, 1.0])
    def test_bitmasks(self, edited, vocab, share):
        words = np.packbits(np.random.default_rng(3).random((4, 32 * (vocab // 32 + 3))) < share, 1, "little")
        edited("apply_bitmask_", np.array(self.ROWS), words.view(np.int32), vocab=vocab)


def test_bit_v_of_a_mask_is_token_v():
    logits = torch.zeros(1, 70)
    words = np.array([[1 << 31, 0b100, 1 << 5]], np.uint32).view(np.int32)
    ops.apply_bitmask_(logits, np.zeros(1, np.int64), words)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [31, 34, 69]


ROW = lists_of([0], [[1]])
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "a temperature per row": ("sample_tokens", (np.ones(1, np.float32),), {}),
    "seeds": ("sample_tokens", (np.ones(2, np.float32),), {"positions_R": np.zeros(2, np.int64)}),
    "int64 top_k": ("sample_tokens", (np.ones(2, np.float32), np.ones(2, np.int32), None, None,
                                      np.zeros(2, np.uint64), np.zeros(2, np.int64)), {}),
    "a token in the vocabulary": ("score_tokens", (torch.tensor([9]), ROW, np.zeros(1, bool)), {"logprobs": True}),
    "chosen ids in the vocabulary": ("score_tokens", (torch.tensor([0]), lists_of([0], [[0, 9]]), np.ones(1, bool)),
                                     {"logprobs": True}),
    "room for the token": ("score_tokens", (torch.tensor([0]), lists_of([0], [[]]), np.zeros(1, bool)),
                           {"logprobs": True}),
    "at most V best": ("score_tokens", (torch.tensor([0]), lists_of([0], [[0] * 11]), np.zeros(1, bool)),
                       {"logprobs": True}),
    "an int64 token": ("score_tokens", (torch.tensor([0]).int(), ROW, np.zeros(1, bool)), {"logprobs": True}),
    "an id above -1": ("mask_at_", (lists_of([0], [[-1]]),), {}),
    "an id below V": ("keep_only_", (lists_of([0], [[9]]),), {}),
    "a value per id": ("add_at_", (ROW, np.zeros(2, np.float32)), {}),
    "three scales": ("penalise_", (ROW, np.zeros(1, np.int32), np.zeros((1, 2), np.float32)), {}),
    "starts up to the end": ("mask_at_", (TokenLists(np.zeros(1, np.int64), np.array([0, 2]), np.array([1])),), {}),
    "rising starts": ("mask_at_", (TokenLists(np.zeros(3, np.int64), np.array([0, 1, 0, 1]), np.array([1])),), {}),
    "a bit per token": ("apply_bitmask_", (np.zeros(1, np.int64), np.zeros((1, 0), np.int32)), {}),
    "a row of bits per row": ("apply_bitmask_", (np.zeros(1, np.int64), np.zeros((2, 1), np.int32)), {}),
}  # fmt: skip


@pytest.mark.parametrize("missing", REFUSED)
def test_arguments_without_what_they_need_are_refused_and_change_nothing(missing):
    name, args, kwargs = REFUSED[missing]
    logits = torch.zeros(2, 9)
    with pytest.raises(ValueError, match=r"sampl|score_tokens|bitmask"):
        getattr(ops, name)(logits, *args, **kwargs)
    assert not logits.any()


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(2, 9).double(), torch.zeros(9), torch.zeros(2, 18)[:, ::2], torch.zeros(2, 0)],
    ids=["float64", "one axis", "gaps", "empty"],
)
def test_logits_must_be_float32_rows(logits):
    with pytest.raises(ValueError, match="sampling"):
        ops.sample_tokens(logits)
    with pytest.raises(ValueError, match="sampling"):
        ops.mask_at_(logits, ROW)
