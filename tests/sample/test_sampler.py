import math

import numpy as np
import pytest
import torch

from tests.sample import reference
from vllm_clone.sample import Bitmask, LogprobWish, Sampler, SamplingBatch, SamplingRows
from vllm_clone.sampling_params import SamplingParams

PROMPT = np.array([1, 2, 3])


def make_batch(params, *, position=4, outputs=None):
    """A batch of rows that all have the same prompt, and outputs if given."""
    rows = SamplingRows(len(params), 97)
    for p in params:
        rows.add(p, p.seed if p.seed is not None else 0, PROMPT, list(outputs or []))
    return rows.select(None, np.full(len(params), position, np.int64))


def random_logits(num_rows, vocab_size=97, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits, params, mode="raw_logprobs", **state):
    return Sampler(mode)(logits.clone(), make_batch(params, **state))


def test_greedy_takes_the_lowest_of_tied_tokens():
    assert sample(torch.tensor([[0.0, 5.0, 5.0, 5.0]]), [SamplingParams(temperature=0)]).token_ids == [1]


def test_plain_greedy_batches_carry_no_arrays():
    batch = make_batch([SamplingParams(temperature=0)] * 3)
    assert batch == SamplingBatch(3)


def test_unused_parameters_carry_no_arrays():
    batch = make_batch([SamplingParams(temperature=0), SamplingParams(temperature=1, seed=1)])
    assert batch.top_k_R is None
    assert batch.top_p_R is None
    assert batch.min_p_R is None


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"top_p": 0.999},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_a_draw_is_the_best_score_plus_noise_among_the_survivors(filters):
    logits = random_logits(40)
    params = [SamplingParams(temperature=0.8, seed=100 + i, **filters) for i in range(40)]
    got = sample(logits, params).token_ids
    for row, p, token in zip((logits / 0.8).tolist(), params, got, strict=True):
        kept = reference.survivors(row, k=p.top_k, p=p.top_p, min_prob=p.min_p)
        assert token == reference.draw(row, kept, p.seed, 4)


def test_a_row_draws_the_same_alone_and_in_any_company():
    kinds = [SamplingParams(temperature=0), *(SamplingParams(temperature=1.1, seed=9, **f) for f in FILTERS)]
    logits = random_logits(1).expand(len(kinds), -1)
    alone = [sample(logits[:1], [p]).token_ids[0] for p in kinds]
    assert sample(logits, kinds).token_ids == alone
    assert sample(logits, kinds[::-1]).token_ids == alone[::-1]


def test_position_and_seed_change_the_draw():
    logits = torch.zeros(1, 1000)
    drawn = {
        sample(logits, [SamplingParams(temperature=1, seed=s)], position=p).token_ids[0]
        for s in range(5)
        for p in range(5)
    }
    assert len(drawn) > 20


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.95}, {"top_k": 6}, {"min_p": 0.05}])
def test_draws_follow_the_distribution(filters):
    n = 20_000
    row = torch.tensor([2.0, 1.0, 0.0, 1.5, -1.0, 0.5, -3.0, 1.0])
    kept = reference.survivors(
        row.tolist(), k=filters.get("top_k", 0), p=filters.get("top_p", 1), min_prob=filters.get("min_p", 0)
    )
    probs = row.masked_fill(torch.tensor([v not in kept for v in range(8)]), -math.inf).softmax(-1)
    params = [SamplingParams(temperature=1, seed=5, **filters)] * n
    rows = SamplingRows(n, 97)
    for p in params:
        rows.add(p, 5, PROMPT, [])
    drawn = Sampler()(row.expand(n, -1).clone(), rows.select(None, np.arange(n))).token_ids
    counts = torch.bincount(torch.tensor(drawn), minlength=8).double()
    assert counts[probs == 0].sum() == 0
    expected = (probs * n)[probs > 0]
    # Chi-square with at most 7 degrees of freedom is below 24.3 in 99.9 % of cases.
    assert float(((counts[probs > 0] - expected) ** 2 / expected).sum()) < 24.3


def test_noise_covers_unlikely_tokens_fairly():
    # One token of probability 1/2 against 20,000 that share the other half: the tail must win half of the time.
    row = torch.zeros(1, 20_001)
    row[0, 0] = math.log(20_000)
    n = 1_200
    rows = SamplingRows(n, 97)
    for i in range(n):
        rows.add(SamplingParams(temperature=1, seed=i), i, PROMPT, [])
    wins = 0
    for start in range(0, n, 100):
        batch = rows.select(np.arange(start, start + 100), np.full(100, 3))
        wins += Sampler()(row.expand(100, -1).clone(), batch).token_ids.count(0)
    assert abs(wins - n / 2) < 4 * math.sqrt(n) / 2


def test_min_tokens_masks_the_stop_set_until_enough_outputs_exist():
    params = [SamplingParams(temperature=0, min_tokens=2, stop_set=[0])]
    logits = torch.tensor([[9.0, 1.0, 0.0, 0.0]])
    assert sample(logits, params, outputs=[]).token_ids == [1]
    assert sample(logits, params, outputs=[1]).token_ids == [1]
    assert sample(logits, params, outputs=[1, 1]).token_ids == [0]


def test_bias_is_applied_before_penalties():
    # Bias lifts −1 to 3, then the repetition penalty halves it; the other order would give 2.
    logits = torch.tensor([[0.0, -1.0, 0.0, 0.0, 1.7]])
    params = SamplingParams(temperature=0, logit_bias={1: 4.0}, repetition_penalty=2.0)
    assert sample(logits, [params]).token_ids == [4]


def test_a_row_with_everything_masked_still_ends_in_a_token():
    for filters in FILTERS:
        params = SamplingParams(temperature=1, seed=1, allowed_token_ids=[3], bad_words_token_ids=[[3]], **filters)
        assert 0 <= sample(random_logits(1), [params]).token_ids[0] < 97


def test_a_row_of_nan_harms_no_other_row():
    for filters in FILTERS:
        params = [SamplingParams(temperature=1, seed=i, **filters) for i in range(3)]
        logits = random_logits(3)
        expected = sample(logits, params).token_ids
        logits[1] = math.nan
        token_ids = sample(logits, params).token_ids
        assert [token_ids[0], token_ids[2]] == [expected[0], expected[2]]
        assert 0 <= token_ids[1] < 97


class TestGrammar:
    def sample(self, logits, params, allowed):
        """Row 0 has a grammar that allows these tokens."""
        batch = make_batch(params)
        words = np.zeros((1, 4), np.int32)
        for token in allowed:
            words[0, token // 32] |= np.int32(1 << token % 32)
        batch.bitmask = Bitmask(np.zeros(1, np.int64), words)
        return Sampler()(logits.clone(), batch)

    def test_it_binds_only_its_row(self):
        logits = random_logits(2)
        output = self.sample(logits, [SamplingParams(temperature=0)] * 2, [40, 66])
        assert output.token_ids == [[40, 66][int(logits[0, [40, 66]].argmax())], int(logits[1].argmax())]

    def test_what_it_allows_shares_all_probability_in_the_raw_scores(self):
        params = SamplingParams(temperature=0, logprobs=3, logit_bias={3: 50.0})
        logits = random_logits(1)
        rows = self.sample(logits, [params], [3, 5]).logprobs[0]
        best = logits[0, [3, 5]].log_softmax(-1).sort(descending=True).values.tolist()
        assert rows.logprobs[0][1:] == pytest.approx([*best, -math.inf], abs=1e-5)

    def test_it_may_end_the_text_before_min_tokens(self):
        params = SamplingParams(temperature=0, min_tokens=9, stop_set=[7])
        assert self.sample(random_logits(1), [params], [7]).token_ids == [7]
        logits = random_logits(1)
        logits[0, 7] = 99.0
        assert self.sample(logits, [params], [7, 8]).token_ids == [8]


class TestLogprobs:
    LOGITS = random_logits(3, seed=3)

    def scores(self, row):
        return reference.log_softmax(self.LOGITS[row].tolist())

    @pytest.mark.parametrize("n", [0, 1, 5])
    def test_each_row_has_its_token_then_its_own_top_n(self, n):
        params = [SamplingParams(temperature=1, seed=i, logprobs=n if i else 2) for i in range(3)]
        output = sample(self.LOGITS, params)
        for row in range(3):
            wanted = n if row else 2
            scores, token = self.scores(row), output.token_ids[row]
            best = sorted(range(97), key=lambda v: -scores[v])[:wanted]
            rows = output.logprobs[row]
            assert rows.token_ids == [[token, *best]]
            assert rows.logprobs[0] == pytest.approx([scores[v] for v in [token, *best]], abs=1e-5)
            assert rows.ranks == [sum(x >= scores[token] for x in scores)]

    def test_minus_one_is_the_whole_vocabulary_beside_rows_with_few(self):
        params = [SamplingParams(temperature=0, logprobs=n) for n in (-1, 1, 3)]
        output = sample(self.LOGITS, params)
        assert [len(output.logprobs[row].token_ids[0]) for row in range(3)] == [98, 2, 4]

    def test_rank_counts_ties(self):
        output = sample(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), [SamplingParams(temperature=0, logprobs=0)])
        assert output.logprobs[0].ranks == [3]

    def test_chosen_ids_replace_the_top_n(self):
        params = [SamplingParams(temperature=0, logprob_token_ids=[8, 2, 40]), SamplingParams(temperature=0)]
        output = sample(self.LOGITS[:2], params)
        scores, token = self.scores(0), output.token_ids[0]
        assert list(output.logprobs) == [0]
        assert output.logprobs[0].token_ids == [[token, 8, 2, 40]]
        assert output.logprobs[0].logprobs[0] == pytest.approx([scores[v] for v in (token, 8, 2, 40)], abs=1e-5)

    def edited(self):
        return SamplingParams(temperature=0.5, seed=1, top_k=4, logprobs=6, logit_bias={0: 2.0})

    def processed(self):
        row = self.LOGITS[0].clone()
        row[0] += 2.0
        row /= 0.5
        return row.masked_fill(row < row.topk(4).values[-1], -math.inf)

    def test_raw_modes_ignore_the_parameters(self):
        for mode, scores in (("raw_logprobs", self.LOGITS[0].log_softmax(-1)), ("raw_logits", self.LOGITS[0])):
            output = sample(self.LOGITS[:1], [self.edited()], mode)
            assert output.logprobs[0].logprobs[0][1:] == pytest.approx(scores.topk(6).values.tolist(), abs=1e-5)

    def test_processed_modes_show_what_was_drawn_from(self):
        row = self.processed()
        for mode, scores in (("processed_logprobs", row.log_softmax(-1)), ("processed_logits", row)):
            for company in ([], [SamplingParams(temperature=0)], [SamplingParams(temperature=1, seed=2)]):
                logits = self.LOGITS[: 1 + len(company)]
                output = sample(logits, [self.edited(), *company], mode)
                values = output.logprobs[0].logprobs[0][1:]
                assert values[:4] == pytest.approx(scores.topk(4).values.tolist(), abs=1e-5)
                assert values[4:] == [-math.inf] * 2

    def test_processed_mode_leaves_greedy_rows_without_temperature(self):
        params = [SamplingParams(temperature=0, logprobs=1), SamplingParams(temperature=0.1, seed=1)]
        output = sample(self.LOGITS[:2], params, "processed_logprobs")
        assert output.logprobs[0].logprobs[0][1] == pytest.approx(max(self.scores(0)), abs=1e-5)


class TestSamplingRows:
    def test_select_takes_rows_in_the_order_asked(self):
        rows = SamplingRows(4, 97)
        for t in (0.5, 0.0, 1.5, 2.0):
            rows.add(SamplingParams(temperature=t, logprobs=int(t * 2)), 1, PROMPT, [])
        batch = rows.select(np.array([3, 0]), np.array([9, 5]))
        assert batch.temperature_R.tolist() == [2.0, 0.5]
        assert sorted(batch.logprobs, key=lambda w: w.row) == [LogprobWish(0, 4), LogprobWish(1, 1)]

    def test_removal_moves_the_last_row_with_all_its_features(self):
        feature = SamplingParams(
            temperature=1,
            top_k=3,
            top_p=0.5,
            min_p=0.1,
            allowed_token_ids=[4],
            logit_bias={2: 1.0},
            min_tokens=5,
            stop_set=[7],
            presence_penalty=1.0,
            bad_words_token_ids=[[4, 6]],
            logprobs=1,
        )
        rows, alone = SamplingRows(3, 97), SamplingRows(1, 97)
        rows.add(SamplingParams(temperature=0, logprobs=3, min_tokens=2, stop_set=[1]), 0, PROMPT, [])
        rows.add(feature, 77, PROMPT, [4, 4])
        alone.add(feature, 77, PROMPT, [4, 4])
        rows.remove(0)
        position = np.array([3])
        assert repr(rows.select(None, position)) == repr(alone.select(None, position))

    def test_an_emptied_batch_has_no_features_left(self):
        rows = SamplingRows(2, 97)
        rows.add(SamplingParams(temperature=1, top_k=3, logprobs=1), 0, PROMPT, [])
        rows.remove(0)
        rows.add(SamplingParams(temperature=0), 0, PROMPT, [])
        assert rows.select(None, np.array([0])) == SamplingBatch(1)

    def test_ids_beyond_the_models_vocabulary_are_left_out(self):
        rows = SamplingRows(1, 97)
        params = SamplingParams(
            temperature=0, min_tokens=5, stop_set=[3, 97], bad_words_token_ids=[[4], [200], [4, 99]]
        )
        rows.add(params, 0, PROMPT, [4])
        batch = rows.select(None, np.array([2]))
        assert [ids.tolist() for _, ids in batch.min_tokens] == [[3]]
        assert [ids.tolist() for _, ids in batch.bad_words] == [[4]]

    def test_min_tokens_is_forgotten_once_reached(self):
        rows, outputs = SamplingRows(1, 97), []
        rows.add(SamplingParams(temperature=0, min_tokens=1, stop_set=[0]), 0, PROMPT, outputs)
        assert rows.select(None, np.array([2])).min_tokens
        outputs.append(5)
        assert rows.select(None, np.array([3])) == SamplingBatch(1)
