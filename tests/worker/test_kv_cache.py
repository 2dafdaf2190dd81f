"""Memory of the KV cache, provided before it is used."""

import pytest
import torch

from vllm_clone.kernels.arena import huge_pages
from vllm_clone.platforms import cpu
from vllm_clone.worker.kv_cache import PagesAhead

MIB = 1 << 20
SLOTS = 8192
"""Of 1 KiB in each of two tensors of 8 MiB."""


@pytest.fixture
def pool() -> list[torch.Tensor]:
    return [torch.from_numpy(huge_pages(8 * MIB)) for _ in range(2)]


def provide_all(pages: PagesAhead) -> int:
    """Bytes that came into this process's memory."""
    before = cpu.resident_memory()
    while pages.provide():
        pass
    return cpu.resident_memory() - before


def test_idle_time_provides_a_bounded_part_of_the_pool(pool):
    pages = PagesAhead(pool, SLOTS, ahead_bytes=4 * MIB)
    assert provide_all(pages) == pytest.approx(4 * MIB, abs=MIB)
    assert not pages.provide()


def test_use_moves_the_goal_and_the_pool_bounds_it(pool):
    pages = PagesAhead(pool, SLOTS, ahead_bytes=4 * MIB)
    provide_all(pages)
    pages.used(2048)
    pages.used(5)
    assert provide_all(pages) == pytest.approx(8 * MIB, abs=MIB)
    pages.used(SLOTS - 1)
    assert provide_all(pages) == pytest.approx(4 * MIB, abs=MIB)


def test_what_is_there_stays(pool):
    pool[1][3 * MIB] = 7
    provide_all(PagesAhead(pool, SLOTS))
    assert pool[1][3 * MIB] == 7
    assert pool[1].sum() == 7


def test_a_system_that_refuses_is_not_asked_again(pool, monkeypatch):
    calls = []
    monkeypatch.setattr(cpu, "populate", lambda *args: calls.append(args) and False)
    pages = PagesAhead(pool, SLOTS)
    assert not pages.provide()
    pages.used(100)
    assert not pages.provide()
    assert len(calls) == 1
