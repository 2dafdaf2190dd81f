"""Every kernel test runs on each instruction set this machine has or emulates, and leaves the choice as it was."""

from collections.abc import Iterator

import pytest
import torch

from vllm_clone.kernels.cpu import ops
from vllm_clone.platforms.cpu import num_usable_cores


@pytest.fixture(autouse=True)
def _one_seed_and_one_torch_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(params=[*ops.available_levels(), *ops.emulated_levels()])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in use."""
    before = ops.active_level()
    ops.use_level(request.param)
    yield request.param
    ops.use_level(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """The test may change the number of threads."""
    yield
    ops.set_num_threads(num_usable_cores())
