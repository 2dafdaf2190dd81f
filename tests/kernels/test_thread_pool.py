"""The pool's threads stay on the cores they are given. In a process of its own, where no other test has a pool."""

import os
import subprocess
import sys

import pytest

PINNED = """
import os
import torch
from vllm_clone.kernels.cpu import ops

def places():
    return sorted(sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task"))

torch.set_num_threads(1)
x, packed = torch.randn(8, 64), ops.pack_linear(torch.randn(4096, 64))
ops.set_num_threads(1)
expected, own = ops.linear(x, packed, 4096, None), sorted(os.sched_getaffinity(0))
alone = places()
first, last = own[0], own[-1]

ops.set_num_threads(4)
ops.set_thread_cores([first, last, first, last])
assert torch.equal(ops.linear(x, packed, 4096, None), expected)
assert places() == sorted([*alone, [last], [first], [last]]), places()

ops.set_thread_cores([last])
assert torch.equal(ops.linear(x, packed, 4096, None), expected)
assert places() == sorted([*alone, [last], [last], [last]]), places()

ops.set_thread_cores([])
assert torch.equal(ops.linear(x, packed, 4096, None), expected)
assert places() == sorted([*alone, own, own, own]), places()
assert sorted(os.sched_getaffinity(0)) == own
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be kept on cores here")
def test_threads_stay_on_their_cores_and_the_caller_where_it_was():
    done = subprocess.run([sys.executable, "-c", PINNED], timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
