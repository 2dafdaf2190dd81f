import numpy as np
import pytest
import torch
from transformers.generation import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from tests.sample.reference import penalise
from vllm_clone.sample import adjust
from vllm_clone.sample.adjust import Penalised
from vllm_clone.sample.token_counts import TokenCounts

INF = float("inf")


def penalised(row, prompt, outputs, repetition=1.0, frequency=0.0, presence=0.0):
    ids, counts = TokenCounts(np.array(prompt), outputs).refresh()
    return Penalised(row, ids, counts, repetition, frequency, presence)


def test_penalty_examples_of_the_semantics():
    logits = torch.tensor([[2.4, -1.2, 5.0]])
    adjust.penalise(logits, [penalised(0, [1], [0, 0], 1.2, 0.5, 0.3)])
    assert logits[0].tolist() == pytest.approx([0.7, -1.44, 5.0], abs=1e-6)


def test_penalties_equal_the_row_by_row_definition():
    generator = np.random.default_rng(5)
    logits = torch.from_numpy(generator.normal(0, 4, (4, 60)).astype(np.float32))
    expected = logits.clone()
    entries = []
    for row, scales in ((0, (1.3, 0.0, 0.0)), (1, (0.7, -0.4, 1.1)), (3, (1.0, 0.9, -2.0))):
        prompt, outputs = (generator.integers(0, 60, n).tolist() for n in (30, 25))
        entries.append(penalised(row, prompt, outputs, *scales))
        expected[row] = torch.tensor(penalise(logits[row].tolist(), prompt, outputs, *scales))
    adjust.penalise(logits, entries)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_repetition_penalty_equals_transformers():
    generator = np.random.default_rng(6)
    logits = torch.from_numpy(generator.normal(0, 4, (1, 60)).astype(np.float32))
    ids = generator.integers(0, 60, 40).tolist()
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone())
    adjust.penalise(logits, [penalised(0, ids[:20], ids[20:], repetition=1.7)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_counts_follow_a_growing_output():
    outputs = [4]
    counts = TokenCounts(np.array([3, 4, 3]), outputs)
    for more in ([], [4, 9], list(range(100, 300)), [9]):
        outputs.extend(more)
        ids, numbers = counts.refresh()
        seen = dict(zip(ids.tolist(), numbers.tolist(), strict=True))
        assert seen == {token: outputs.count(token) for token in {3, 4, *outputs}}


def test_bias_is_added_to_the_listed_ids_only():
    logits = torch.zeros(3, 4)
    entries = [(0, np.array([1, 3])), (2, np.array([0]))]
    adjust.add_bias(logits, entries, [np.array([2, -100], np.float32), np.array([5], np.float32)])
    assert logits.tolist() == [[0, 2, 0, -100], [0, 0, 0, 0], [5, 0, 0, 0]]


def test_allowed_ids_leave_only_themselves():
    logits = torch.arange(8.0).reshape(2, 4)
    adjust.allow_only(logits, [(1, np.array([0, 2]))])
    assert logits.tolist() == [[0, 1, 2, 3], [4, -INF, 6, -INF]]


def test_masked_ids_equal_transformers():
    logits = torch.randn(2, 6)
    expected = SuppressTokensLogitsProcessor([1, 5])(torch.zeros(2, 1), logits.clone())
    adjust.mask(logits, [(0, np.array([1, 5])), (1, np.array([1, 5]))])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("outputs", "banned"),
    [([], [7]), ([1], [7, 2]), ([1, 2], [7, 3]), ([9, 1, 2], [7, 3]), ([2, 1], [7, 2]), ([1, 2, 3], [7])],
)
def test_bad_words_ban_the_id_that_would_complete_them(outputs, banned):
    assert adjust.banned_endings([[7], [1, 2], [1, 2, 3]], outputs) == banned


def test_bad_words_equal_transformers():
    words = [[7], [1, 2], [1, 2, 3]]
    processors = LogitsProcessorList([NoBadWordsLogitsProcessor(words)])
    for outputs in ([5, 1], [5, 1, 2], [5, 2, 1], [1, 2, 3]):
        expected = processors(torch.tensor([outputs]), torch.zeros(1, 10))
        logits = torch.zeros(1, 10)
        adjust.mask(logits, [(0, np.array(adjust.banned_endings(words, outputs)))])
        assert torch.equal(logits, expected)
