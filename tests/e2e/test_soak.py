"""Continuous batching under random lengths and aborts, a short run of benchmarks/soak.py."""

import subprocess
import sys
from pathlib import Path

from tests.e2e.server import Server

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_no_request_is_lost_and_no_block_leaks(toy: Server) -> None:
    command = [sys.executable, str(SOAK), "--url", toy.url, "--requests", "300", "--streams", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
