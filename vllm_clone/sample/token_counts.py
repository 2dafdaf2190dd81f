"""Which tokens a sequence has seen, kept sparse: memory and time follow the sequence, not the vocabulary."""

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """Distinct tokens of prompt and output, and how often each was generated."""

    def __init__(self, prompt_ids: np.ndarray, output_ids: Sequence[int]) -> None:
        """Count a prompt; outputs (a live list that grows) are counted by :meth:`refresh`."""
        distinct = np.unique(prompt_ids).astype(np.int64)
        self._output_ids = output_ids
        self._num_counted = 0
        self._size = len(distinct)
        self._slots: dict[int, int] = dict(zip(distinct.tolist(), range(self._size), strict=True))
        self._ids = np.empty(max(2 * self._size, 64), np.int64)
        self._counts = np.zeros(len(self._ids), np.int32)
        self._ids[: self._size] = distinct

    def refresh(self) -> tuple[np.ndarray, np.ndarray]:
        """Count the outputs added since the last call.

        Returns:
            Distinct token ids (int64) and their number of occurrences in the output (int32); views that the next
            call may change.
        """
        for token in self._output_ids[self._num_counted :]:
            slot = self._slots.setdefault(token, self._size)
            if slot == self._size:
                self._append(token)
            self._counts[slot] += 1
        self._num_counted = len(self._output_ids)
        return self._ids[: self._size], self._counts[: self._size]

    def _append(self, token: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[self._size] = token
        self._size += 1
