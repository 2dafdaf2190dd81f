"""The thread pool and fork: a child has none of its parent's threads."""

import os
import subprocess
import sys

import pytest

FORK = """
import os
import torch
from vllm_clone.kernels.cpu import ops

ops.set_num_threads(4)
x, packed = torch.randn(8, 64), ops.pack_linear(torch.randn(4096, 64))
expected = ops.linear(x, packed, 4096, None)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ops.linear(x, packed, 4096, None), expected) else 3)
status = os.waitpid(child, 0)[1]
assert torch.equal(ops.linear(x, packed, 4096, None), expected)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_starts_threads_of_its_own():
    assert subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False).returncode == 0
