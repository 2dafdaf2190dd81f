"""The thread pool by itself: tasks in quick succession, on more threads than cores."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cpu"
TASKS = 300_000


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("pool") / "stress"
    files = [HERE / "thread_pool_stress.cpp", SOURCES / "thread_pool.cpp"]
    subprocess.run([compiler, "-O2", "-std=c++20", "-pthread", f"-I{SOURCES}", *files, "-o", program], check=True)
    return program


@pytest.mark.parametrize("threads", [2, 8])
def test_every_item_of_every_task_runs_once_and_no_task_hangs(stress, threads):
    ended = subprocess.run([stress, str(threads), str(TASKS)], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
