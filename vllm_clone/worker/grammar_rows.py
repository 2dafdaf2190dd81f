"""The masks of a step's grammars by row of its logits."""

import numpy as np

from vllm_clone.sample.adjust import Bitmask
from vllm_clone.step import GrammarMasks


class GrammarRows:
    """Masks sorted by where their requests stand among the sampling rows, so that slices of logits take theirs."""

    def __init__(self, masks: GrammarMasks, batch_rows_E: np.ndarray, sampling_rows_R: np.ndarray) -> None:
        """``batch_rows_E``: batch row of each mask; ``sampling_rows_R``: batch row of each row of the logits."""
        place = np.full(int(max(batch_rows_E.max(), sampling_rows_R.max())) + 1, -1, np.int64)
        place[sampling_rows_R] = np.arange(len(sampling_rows_R))
        places_E = place[batch_rows_E]
        order_E = np.argsort(places_E)
        words_EW = np.frombuffer(masks.words, np.int32).reshape(len(batch_rows_E), -1)
        self._places_E = places_E[order_E]
        self._words_EW = words_EW[order_E]

    def part(self, start: int, end: int) -> Bitmask | None:
        """The masks of logits rows ``start`` up to ``end``, counted from ``start``; None when they have none."""
        first, last = np.searchsorted(self._places_E, (start, end)).tolist()
        if first == last:
            return None
        return Bitmask(self._places_E[first:last] - start, self._words_EW[first:last])
