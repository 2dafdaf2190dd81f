"""How long an engine takes to be ready, in processes of their own."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from vllm_clone.benchmarks.offline.latency import percentiles
from vllm_clone.engine.arg_utils import EngineArgs
from vllm_clone.errors import EngineDeadError

WIDTH = 60
CHILD = (
    "import json, sys, time\n"
    "begun = time.perf_counter()\n"
    "from vllm_clone.engine.arg_utils import EngineArgs\n"
    "from vllm_clone.engine.llm_engine import LLMEngine\n"
    "LLMEngine(EngineArgs(**json.load(sys.stdin)).create_engine_config('offline'))\n"
    "print('ready after', time.perf_counter() - begun)\n"
)
"""Imports count: whoever starts an engine waits for them too."""


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """How often; cold starts read the model's files from the disk."""

    num_iters_cold: int = 3
    num_iters_warmup: int = 1
    num_iters_warm: int = 3
    output_json: str | None = None


def measure(engine_values: dict[str, Any], options: StartupOptions) -> None:
    """Start engines, print and keep what was measured.

    Raises:
        ConfigError: the engine cannot be configured.
        EngineDeadError: a start failed.
    """
    config = EngineArgs(**engine_values).create_engine_config("offline")
    files = _files(Path(config.model_config.model))

    def starts(what: str, count: int, *, cold: bool) -> list[float]:
        print(f"\n{what}...\n")
        name = "Cold startup" if cold else "Warm startup"
        seconds = []
        for _ in tqdm(range(count), desc=f"{name} iterations", file=sys.stderr):
            if cold:
                _forget(files)
            seconds.append(_start(engine_values))
        return seconds

    cold = starts("Measuring cold startup time", options.num_iters_cold, cold=True)
    starts("Warming up for warm startup measurement", options.num_iters_warmup, cold=False)
    warm = starts("Measuring warm startup time", options.num_iters_warm, cold=False)
    kept: dict[str, Any] = {}
    print("\n" + "=" * WIDTH + "\nSTARTUP TIME BENCHMARK RESULTS\n" + "=" * WIDTH)
    for kind, seconds in (("cold", cold), ("warm", warm)):
        if seconds:
            _report(kind, seconds, kept)
    print("=" * WIDTH)
    if options.output_json is not None:
        Path(options.output_json).write_text(json.dumps(kept, indent=4))


def _report(kind: str, seconds: list[float], kept: dict[str, Any]) -> None:
    """Nothing is compiled at start here; the zeros are for scripts that look for them."""
    print(f"\n{kind.upper()} STARTUP:")
    measured = {"startup": seconds, "compilation": [0.0] * len(seconds)}
    for what, values in measured.items():
        print(f"Avg {what} time: {np.mean(values):.2f} seconds")
    for what, values in measured.items():
        by_percentile = percentiles(values)
        print(f"{what.capitalize()} time percentiles:")
        for name, value in by_percentile.items():
            print(f"  {name}%: {value:.2f} seconds")
        kept |= {
            f"avg_{kind}_{what}_time": float(np.mean(values)),
            f"{kind}_{what}_times": values,
            f"{kind}_{what}_percentiles": by_percentile,
        }


def _start(engine_values: dict[str, Any]) -> float:
    """Seconds from the command to an engine that is ready."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=msgspec.json.encode(engine_values).decode(),
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begun
    if done.returncode != 0 or "ready after" not in done.stdout:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise EngineDeadError(f"A start failed with exit code {done.returncode}: {lines[-1]}")
    return seconds


def _files(model: Path) -> list[Path]:
    return [path for path in model.iterdir() if path.is_file()] if model.is_dir() else [model] if model.exists() else []


def _forget(files: list[Path]) -> None:
    """Have the system drop the files from its cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
