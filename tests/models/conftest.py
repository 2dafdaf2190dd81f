"""Each tiny checkpoint is made once per worker."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.families import VARIANTS, build, expected_logits, prompt, save


@dataclass(frozen=True)
class Example:
    """A checkpoint on disk, the model it came from, a prompt, and the logits the model gives for it."""

    path: Path
    hf_config: dict[str, Any]
    model: PreTrainedModel
    tokens: list[int]
    logits: torch.Tensor


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Example]:
    """name in VARIANTS → the example."""

    @cache
    def make(name: str) -> Example:
        path = tmp_path_factory.mktemp(name)
        model, tokens = build(VARIANTS[name]), prompt(VARIANTS[name])
        return Example(path, save(model, path), model, tokens, expected_logits(model, tokens))

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
