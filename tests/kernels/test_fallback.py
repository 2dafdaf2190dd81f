"""Without the compiled extension the reference answers, and says so."""

import subprocess
import sys

from vllm_clone import kernels
from vllm_clone.kernels import reference
from vllm_clone.kernels.cpu import ops

WITHOUT_EXTENSION = """
import sys
sys.modules["vllm_clone.kernels.cpu._C"] = None
import torch
from vllm_clone import kernels
print(kernels.active_level())
print(kernels.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist())
"""


def test_plain_torch_stands_in_for_a_missing_extension_with_a_warning():
    run = subprocess.run([sys.executable, "-c", WITHOUT_EXTENSION], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-2:] == ["reference", "[[1.0, 1.0, 1.0, 1.0]]"]
    assert "The compiled CPU kernels are missing" in run.stdout + run.stderr


def test_every_kernel_has_a_reference():
    offered = [
        name
        for name, value in vars(kernels).items()
        if getattr(value, "__module__", "").startswith(ops.__name__.rpartition(".")[0]) and hasattr(ops, name)
    ]
    assert offered
    assert [name for name in offered if not hasattr(reference, name)] == []
