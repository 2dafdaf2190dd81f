"""Memory of recorded steps: live tensors never overlap, dead ones make room."""

import gc
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_clone.kernels.arena import Arena


def span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.itemsize


def test_tensors_are_aligned_contiguous_and_of_the_asked_kind() -> None:
    arena = Arena()
    for shape, dtype in (((3, 5), torch.bfloat16), ((7,), torch.float32), ((2, 0), torch.int64)):
        tensor = arena.empty(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % 64 == 0


def test_the_place_of_a_dead_tensor_is_used_again() -> None:
    arena = Arena()
    first = arena.empty((100,), torch.float32)
    place = first.data_ptr()
    del first
    assert arena.empty((90,), torch.float32).data_ptr() == place


def test_a_view_keeps_its_place() -> None:
    arena = Arena()
    view = arena.empty((4, 100), torch.float32)[2].view(10, 10)
    assert arena.empty((4, 100), torch.float32).data_ptr() > view.data_ptr()


def test_one_large_tensor_gets_memory_of_its_size() -> None:
    arena = Arena()
    big = arena.empty((50 << 20,), torch.uint8)
    assert arena.num_bytes == 50 << 20
    big.fill_(1)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 << 20), st.integers(0, 7)), max_size=40))
def test_live_tensors_never_overlap(steps: list[tuple[bool, int, int]]) -> None:
    arena, live = Arena(), []
    for drop, size, which in steps:
        if drop and live:
            live.pop(which % len(live))
        else:
            live.append(arena.empty((size,), torch.uint8))
        spans = sorted(map(span, live))
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    live.clear()
    gc.collect()
    held = arena.num_bytes
    arena.empty((1 << 20,), torch.uint8)
    assert arena.num_bytes == max(held, 32 << 20)
