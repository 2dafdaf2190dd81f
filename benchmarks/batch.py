#!/usr/bin/env python3
"""`vllm run-batch` under kill -9: every line answered once, in flat memory.

    batch.py MODEL [--lines 10000] [--kills 3]

Writes lines of which one in a hundred is malformed, runs them, kills the whole process group at random moments, resumes
each time, and counts answers. Prints the memory of the process that reads and writes, at a quarter of the answers and
at the end. Exits 1 when an answer is missing or there twice.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

VLLM = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main"]


def write_lines(path: Path, count: int) -> None:
    with path.open("w") as file:
        for n in range(count):
            body = {"model": "m", "prompt": f"Request {n}:", "max_tokens": 8, "ignore_eos": True}
            whole = {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write("{malformed\n" if n % 100 == 50 else json.dumps(whole) + "\n")


def num_answers(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_until(command: list[str], output: Path, stop_at: int | None, memory: list[float]) -> int | None:
    """Start, and kill when there are so many answers; the exit code, None when killed."""
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    seen = psutil.Process(process.pid)
    while process.poll() is None:
        if stop_at is not None and num_answers(output) >= stop_at:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        try:
            memory.append(seen.memory_info().rss / 2**20)
        except psutil.Error:
            break
        time.sleep(0.05)
    return process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        write_lines(source, args.lines)
        command = [*VLLM, "run-batch", "-i", str(source), "-o", str(output), "--model", args.model]
        command += ["--served-model-name", "m", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M", "--resume"]
        begun = time.monotonic()
        for stop_at in sorted(random.Random(0).sample(range(args.lines // 10, args.lines * 9 // 10), args.kills)):
            run_until(command, output, stop_at, [])
            print(f"killed with {num_answers(output)} answers")
        memory: list[float] = []
        code = run_until(command, output, None, memory)
        answers = [json.loads(line) for line in output.read_text().splitlines()]
    names = Counter(answer["custom_id"] for answer in answers)
    malformed = names.pop(None, 0)
    once = len({answer["id"] for answer in answers})
    print(f"exit code {code}; {len(answers)} answers, {once} different, {malformed} to malformed lines; "
          f"{time.monotonic() - begun:.1f} s in all")  # fmt: skip
    print(f"memory of the last run: {memory[len(memory) // 4]:.0f} MiB at a quarter, {memory[-1]:.0f} MiB at the end")
    if code != 0 or not len(answers) == once == args.lines or set(names.values()) != {1}:
        sys.exit(1)


if __name__ == "__main__":
    main()
