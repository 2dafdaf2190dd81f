"""Kill `vllm run-batch` again and again, resume it, and count: every line must have one result, memory stay flat.

python benchmarks/run_batch_kills.py MODEL [--lines 10000] [--kills 3]
"""

import argparse
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

VLLM = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main"]


def write_input(path: Path, count: int) -> None:
    """``count`` requests for four tokens each; one in a hundred is no JSON."""
    with path.open("w") as file:
        for i in range(count):
            body = {"model": "toy", "max_tokens": 4, "temperature": 0, "prompt": f"Number {i}"}
            line = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(f'{{"custom_id": "c{i}", oops\n' if i % 100 == 7 else json.dumps(line) + "\n")


def lines_in(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return sum(1 for _ in file)
    return 0


def run_until(command: list[str], output: Path, lines: int | None) -> list[int]:
    """Run, kill -9 once the output has ``lines`` lines; resident bytes of the process, sampled on the way."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    watched, sizes = psutil.Process(process.pid), []
    while process.poll() is None:
        if lines_in(output) > 0:
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes.append(watched.memory_info().rss)
        if lines is not None and lines_in(output) >= lines:
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)
    if process.wait() not in (0, -signal.SIGKILL):
        raise RuntimeError(f"run-batch ended with {process.returncode}")
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lines", type=int, default=10000)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        source, output = Path(directory, "in.jsonl"), Path(directory, "out.jsonl")
        write_input(source, args.lines)
        command = [*VLLM, "run-batch", "-i", str(source), "-o", str(output), "--resume", "--model", args.model]
        command += ["--served-model-name", "toy", "--kv-cache-memory-bytes", "64M"]
        for kill in range(args.kills + 1):
            goal = args.lines * (kill + 1) // (args.kills + 1) if kill < args.kills else None
            sizes = run_until(command, output, goal)
            if kill < args.kills and len(sizes) > 1:
                with output.open("ab") as file:
                    file.write(b'{"id":"vllm-torn')  # what a crash in the middle of a write leaves
            middle, peak = (sorted(sizes)[len(sizes) // 2], max(sizes)) if sizes else (0, 0)
            shown = f"{middle / 2**20:.0f} MiB resident in the middle, {peak / 2**20:.0f} at most"
            print(f"run {kill + 1}: {lines_in(output)} lines; {shown}", flush=True)
        with output.open() as file:
            results = [json.loads(line) for line in file]
    seen = collections.Counter(result["custom_id"] for result in results)
    failed = sum(result["error"] is not None for result in results)
    print(f"{len(results)} results of {args.lines} lines, {len(seen)} custom ids, {failed} errors")
    if len(results) != args.lines or len(seen) != args.lines or max(seen.values()) != 1:
        sys.exit("lines were lost or repeated")


if __name__ == "__main__":
    main()
