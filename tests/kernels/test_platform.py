"""Which kernels run, on how many threads, and that other Python threads run beside them."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from vllm_clone import kernels
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops


def test_every_machine_has_the_portable_level_last():
    assert ops.available_levels()[-1] == "portable"
    assert ops.active_level() in ops.available_levels()


def test_every_kernel_of_the_reference_is_offered():
    defined = {n for n, f in vars(reference).items() if callable(f) and n[0] != "_" and f.__module__ == reference.__name__}
    assert defined
    assert all(getattr(kernels, name) is getattr(ops, name) for name in defined)


def test_emulated_levels_are_never_chosen_by_themselves():
    assert not set(ops.emulated_levels()) & set(ops.available_levels())


def test_amx_is_the_best_level_exactly_where_its_tiles_are_ready():
    assert ("amx" in ops.available_levels()) == (ops.amx_state() == "ready")
    assert "amx" not in ops.available_levels()[1:]


@pytest.mark.parametrize("level", [*ops.available_levels(), *ops.emulated_levels()])
def test_the_environment_chooses_the_level(level):
    done = subprocess.run(
        [sys.executable, "-c", "from vllm_clone import kernels; print(kernels.active_level())"],
        env={**os.environ, "VLLM_CPU_ISA": level},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == level


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_number_of_threads_changes_no_bit(dtype):
    x, weight = torch.randn(500, 130).to(dtype), torch.randn(130).to(dtype)
    positions, table = torch.arange(500), torch.rand(500, 10)
    results = []
    for threads in (1, 2, 7):
        ops.set_num_threads(threads)
        q, k = x.clone(), x.clone()
        ops.rotary_embedding_(positions, q, k, table, 26, False)
        outputs = [
            q, k, ops.rms_norm(x, weight, 1e-5), ops.layer_norm(x, weight, weight, 1e-5), ops.silu_and_mul(x),
            ops.gelu(x, approximate="none"),
        ]  # fmt: skip
        results.append(torch.cat([out.flatten() for out in outputs]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("threads")
def test_several_python_threads_may_call_at_once():
    ops.set_num_threads(2)
    weight = torch.randn(300, 64)
    packed = ops.pack_linear(weight)
    inputs = [torch.randn(50, 64) for _ in range(4)]
    expected = [ops.linear(x, packed, 300, None) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.equal(ops.linear(inputs[i], packed, 300, None), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert wrong == []
    assert not any(worker.is_alive() for worker in workers)
