"""What a recording refuses and what its tape checks; tests/models/test_parity.py shows that replays are right."""

from collections.abc import Callable

import pytest
import torch

from vllm_clone import kernels
from vllm_clone.config.kv_cache import FullAttentionSpec, KVCacheGroup
from vllm_clone.kernels.arena import Arena
from vllm_clone.worker.graphs import NotRecordableError, RecordedForward

GROUP = KVCacheGroup(("a",), FullAttentionSpec(8, 1, 16, "float32"))


def record(forward: Callable[..., torch.Tensor]) -> RecordedForward:
    return RecordedForward(forward, [GROUP], 8, 4, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("add", lambda ids, positions, ctx: torch.add(ids, positions)),
        ("mul", lambda ids, positions, ctx: ids * positions),
        ("iadd", lambda ids, positions, ctx: ids.__iadd__(positions)),
        ("add_", lambda ids, positions, ctx: ids.add_(positions)),
        ("item", lambda ids, positions, ctx: ids[0].item()),
        ("setitem", lambda ids, positions, ctx: ids.__setitem__(0, 1)),
        ("arange", lambda ids, positions, ctx: torch.arange(3)),
        ("getitem", lambda ids, positions, ctx: ids[torch.tensor([1])]),
        ("out", lambda ids, positions, ctx: torch.add(ids, positions, out=ids)),
        ("relu", lambda ids, positions, ctx: torch.nn.functional.relu(ids)),
        ("contiguous", lambda ids, positions, ctx: ids.view(2, 4).t().contiguous()),
    ],
)
def test_what_torch_computes_cannot_be_recorded(name: str, forward: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(NotRecordableError, match="the model calls torch's"):
        record(forward)


def test_views_and_kernels_can() -> None:
    weight = torch.ones(16)

    def forward(ids: torch.Tensor, positions: torch.Tensor, ctx: object) -> torch.Tensor:
        x = kernels.embedding(table, ids)
        first, _ = kernels.rms_norm(x.view(-1, 16), weight, 1e-6).split([8, 8], dim=-1)
        return first

    table = torch.arange(160.0).view(10, 16)
    assert record(forward).num_calls == 2


def test_nothing_is_computed_while_recording_and_everything_when_replayed() -> None:
    x = torch.arange(12.0).view(4, 3)
    before = x.clone()
    assert kernels.Tape is not None
    tape = kernels.Tape(4, 2, Arena())
    with tape.record():
        kernels.scale_(x, 2.0)
        doubled = kernels.relu(x)
    assert torch.equal(x, before)
    tape.run(3, 1)
    assert torch.equal(x[:3], 2 * before[:3])
    assert torch.equal(x[3], before[3])
    assert torch.equal(doubled[:3], 2 * before[:3])


def test_a_tape_refuses_a_larger_batch_and_calls_of_other_row_counts() -> None:
    assert kernels.Tape is not None
    tape = kernels.Tape(4, 2, Arena())
    for size in ((5, 1), (4, 3), (-1, 1)):
        with pytest.raises(ValueError, match="larger than the recorded one"):
            tape.run(*size)
    with pytest.raises(ValueError, match="multiple of the batch"), tape.record():
        kernels.scale_(torch.ones(5, 3), 2.0)
    kernels.scale_(ones := torch.ones(5, 3), 2.0)  # recording has ended all the same
    assert ones[0, 0] == 2
