"""Masks by row of the logits."""

import numpy as np

from vllm_clone.step import GrammarMasks
from vllm_clone.worker.grammar_rows import GrammarRows


def rows(batch_rows: list[int], sampling_rows: list[int]) -> GrammarRows:
    """Mask i is one word that holds i."""
    words = bytearray(np.arange(len(batch_rows), dtype=np.int32).tobytes())
    masks = GrammarMasks([str(i) for i in batch_rows], words)
    return GrammarRows(masks, np.array(batch_rows, np.int64), np.array(sampling_rows, np.int64))


def test_masks_stand_where_their_requests_stand_among_the_sampling_rows():
    part = rows([7, 2, 5], [5, 0, 7, 2]).part(0, 4)
    assert part is not None
    assert part.rows_E.tolist() == [0, 2, 3]
    assert part.words_EW.tolist() == [[2], [0], [1]]


def test_each_slice_of_the_logits_takes_its_own_counted_from_its_start():
    masks = rows([7, 2, 5], [5, 0, 7, 2])
    first, last = masks.part(0, 2), masks.part(2, 4)
    assert first is not None
    assert last is not None
    assert (first.rows_E.tolist(), first.words_EW.tolist()) == ([0], [[2]])
    assert (last.rows_E.tolist(), last.words_EW.tolist()) == ([0, 1], [[0], [1]])


def test_a_slice_without_masks_has_none():
    masks = rows([9], [1, 9])
    assert masks.part(0, 1) is None
    assert masks.part(1, 2) is not None
