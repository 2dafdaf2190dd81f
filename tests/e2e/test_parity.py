"""The real model in bf16 against transformers: a short run of benchmarks/parity.py."""

import subprocess
import sys
from pathlib import Path

import pytest

PARITY = Path(__file__).parents[2] / "benchmarks" / "parity.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_differs_from_transformers_only_in_bf16_noise() -> None:
    command = [sys.executable, str(PARITY), "--prompts", "6", "--tokens", "24"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
