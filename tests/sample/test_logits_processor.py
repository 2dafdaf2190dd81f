"""Processors of a user's own: what they are told of the batch, and what they may do to logits."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_clone.config import ModelConfig, VllmConfig
from vllm_clone.errors import ConfigError
from vllm_clone.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    ProcessorChain,
    changes,
)
from vllm_clone.sampling_params import SamplingParams

CPU = torch.device("cpu")


@dataclass(eq=False)
class Request:
    name: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    output_ids: list[int] = field(default_factory=list)

    @property
    def prompt_ids(self) -> np.ndarray:
        return np.array([1, 2])


class Follower(LogitsProcessor):
    """Keeps each row's output list and forbids the token that ``extra_args`` names, once something was said."""

    made: list["Follower"] = []

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("forbid", 0) < 0:
            raise ValueError("forbid must be a token id")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[SamplingParams, list[int]]] = {}
        self.updates: list[BatchUpdate | None] = []
        self.made.append(self)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (params, outputs) in self.rows.items():
            if outputs and params.extra_args:
                logits[row, params.extra_args["forbid"]] = -torch.inf
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        if batch_update is not None:
            take_in(self.rows, batch_update, lambda added: (added[1], added[3]))


class Doubled(Follower):
    """A new tensor, and nothing a greedy row would notice."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * 2

    def is_argmax_invariant(self) -> bool:
        return True


class Broken(Follower):
    def __init__(self, *args: Any) -> None:
        raise KeyError("nothing here")


def take_in(rows: dict[int, Any], update: BatchUpdate, state: Any) -> None:
    """As the interface says: removed, added, moved."""
    for row in update.removed:
        del rows[row]
    for added in update.added:
        assert added[0] not in rows, "an added request lands on another one"
        rows[added[0]] = state(added)
    for source, target, direction in update.moved:
        if direction is MoveDirectionality.SWAP:
            rows[source], rows[target] = rows[target], rows[source]
        else:
            assert target not in rows
            rows[target] = rows.pop(source)
    assert sorted(rows) == list(range(update.batch_size))


@given(st.lists(st.lists(st.integers(0, 7), unique=True, max_size=8), max_size=6))
def test_any_two_arrangements_are_bridged(arrangements: list[list[int]]) -> None:
    requests = [Request() for _ in range(8)]
    names = {id(request.output_ids): i for i, request in enumerate(requests)}
    followed: dict[int, int] = {}
    before: list[Request] = []
    for arrangement in arrangements:
        after = [requests[i] for i in arrangement]
        update = changes(before, after)
        assert (update is None) == (before == after)
        if update is not None:
            take_in(followed, update, lambda added: names[id(added[3])])
        assert [followed[i] for i in range(len(after))] == arrangement
        before = after


def chain(*names: str) -> ProcessorChain:
    Follower.made.clear()
    return ProcessorChain([f"{__name__}.{name}" for name in names], VllmConfig(model_config=ModelConfig()), CPU)


def test_rows_that_sample_are_edited_and_the_others_stay_out() -> None:
    processors = chain("Follower")
    quiet = Request(params=SamplingParams(extra_args={"forbid": 0}))
    talking = Request(params=SamplingParams(extra_args={"forbid": 2}), output_ids=[7])
    rows = [Request(), quiet, talking]
    processors.update(rows)
    processors.update(rows)
    assert Follower.made[0].updates[1] is None
    logits = torch.ones(2, 4)
    processors.apply(logits, np.array([2, 1]), all_greedy=False)
    assert logits.tolist() == [[1, 1, -torch.inf, 1], [1, 1, 1, 1]]


def test_a_new_tensor_counts_and_greedy_batches_skip_what_they_would_not_notice() -> None:
    processors = chain("Doubled")
    processors.update([Request()])
    logits = torch.ones(1, 3)
    processors.apply(logits, None, all_greedy=True)
    assert logits.tolist() == [[1, 1, 1]]
    processors.apply(logits, None, all_greedy=False)
    assert logits.tolist() == [[2, 2, 2]]


@pytest.mark.parametrize(("name", "message"), [("Broken", "cannot be made .KeyError"), ("Missing", "has no Missing")])
def test_a_class_that_cannot_be_used_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chain(name)
