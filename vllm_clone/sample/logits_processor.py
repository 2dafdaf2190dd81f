"""Logits processors of a user's own: the interface, and how the batch's changes reach them. B rows, V vocabulary."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from vllm_clone.config import VllmConfig
from vllm_clone.config.named_code import import_named
from vllm_clone.errors import ConfigError
from vllm_clone.sampling_params import SamplingParams


class MoveDirectionality(enum.Enum):
    """What a move does to the row it goes to."""

    UNIDIRECTIONAL = 0
    """It was empty."""
    SWAP = 1
    """Its request goes to the row that the other came from."""


@dataclass(slots=True)
class BatchUpdate:
    """Changes since the last step; to be taken in as removed, then added, then moved in order."""

    batch_size: int
    """Rows after the changes."""
    removed: list[int] = field(default_factory=list)
    added: list[tuple[int, SamplingParams, list[int], list[int]]] = field(default_factory=list)
    """Row, parameters, prompt ids, and output ids: a list that grows as the request does."""
    moved: list[tuple[int, int, MoveDirectionality]] = field(default_factory=list)
    """From, to."""


class LogitsProcessor(ABC):
    """Edits the logits of all rows at once; one instance serves the whole engine.

    A class named by ``--logits-processors`` need not inherit from this one if it has these methods. It runs after
    allowed ids, logit bias and min_tokens, before penalties and the temperature.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError when a request's parameters (``extra_args``) cannot be served; runs in the API server."""
        return

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, V], float32, changed in place or new. Rows that sample nothing in this step are zero."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether greedy rows come out the same without it; it is then left out of greedy batches."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each step's :meth:`apply`; None when rows are as they were."""


class Row(Protocol):
    """What a processor may know of a row."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_ids(self) -> np.ndarray: ...
    @property
    def output_ids(self) -> list[int]: ...


class ProcessorChain:
    """The processors of an engine, in the order given.

    Raises:
        ConfigError: one cannot be imported or made.
    """

    def __init__(self, names: Sequence[str], config: VllmConfig, device: torch.device) -> None:
        self._processors: list[LogitsProcessor] = []
        for name in names:
            processor_class = import_named("--logits-processors", name)
            try:
                self._processors.append(processor_class(config, device, False))
            except Exception as error:  # the user's own code may raise anything
                raise ConfigError(
                    f"--logits-processors {name}: cannot be made ({type(error).__name__}: {error})."
                ) from error
        self._rows: list[Row] = []

    def update(self, rows: Sequence[Row]) -> None:
        """Tell every processor what has changed since the last step; a row is the same while it is the same object."""
        change = changes(self._rows, rows)
        self._rows = list(rows)
        for processor in self._processors:
            processor.update_state(change)

    def apply(self, logits_RV: torch.Tensor, rows_R: np.ndarray | None, *, all_greedy: bool) -> None:
        """Run the processors over the logits of some rows, or of all rows in order (None), in place."""
        size = len(self._rows)
        places = None if rows_R is None else torch.from_numpy(rows_R)
        logits_BV = logits_RV
        if places is not None:
            logits_BV = logits_RV.new_zeros(size, logits_RV.shape[1])
            logits_BV[places] = logits_RV
        for processor in self._processors:
            if not (all_greedy and processor.is_argmax_invariant()):
                logits_BV = processor.apply(logits_BV)
        if places is not None:
            logits_BV = logits_BV[places]
        if logits_BV is not logits_RV:
            logits_RV.copy_(logits_BV)


def changes(before: Sequence[Row], after: Sequence[Row]) -> BatchUpdate | None:
    """The update that takes processors from one arrangement of rows to another; None when they are equal."""
    if len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True)):
        return None
    update = BatchUpdate(len(after))
    staying, known = {id(row) for row in after}, {id(row) for row in before}
    rows: list[Row | None] = [row if id(row) in staying else None for row in before]
    update.removed = [i for i, row in enumerate(rows) if row is None]
    rows += [None] * (len(after) - len(rows))
    # Added rows come before moves, so each is put where nothing is: in its own place, else in any hole.
    new = [(i, row) for i, row in enumerate(after) if id(row) not in known]
    homeless = []
    for place, row in new:
        if rows[place] is None:
            rows[place] = row
            update.added.append(_added(place, row))
        else:
            homeless.append(row)
    holes = (i for i, row in enumerate(rows) if row is None)
    for row in homeless:
        place = next(holes)
        rows[place] = row
        update.added.append(_added(place, row))
    where = {id(row): i for i, row in enumerate(rows) if row is not None}
    for place, row in enumerate(after):
        source, other = where[id(row)], rows[place]
        if source == place:
            continue
        rows[place], rows[source] = row, other
        where[id(row)] = place
        if other is None:
            update.moved.append((source, place, MoveDirectionality.UNIDIRECTIONAL))
        else:
            where[id(other)] = source
            update.moved.append((source, place, MoveDirectionality.SWAP))
    return update


def _added(place: int, row: Row) -> tuple[int, SamplingParams, list[int], list[int]]:
    return place, row.params, row.prompt_ids.tolist(), row.output_ids
