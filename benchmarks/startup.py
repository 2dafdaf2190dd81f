#!/usr/bin/env python3
"""How soon a server is ready, and what it costs beside weights and KV cache.

    startup.py MODEL [--runs 5] [-- flags of vllm serve]

The servers have a KV cache of 256 MiB. Prints medians: seconds from the command to /health 200; memory of all processes
after one short request, when the whole cache is provided, less weights and cache; the engine's peak while loading, with
the file's pages, beside the weights; processor time of a quiet second; seconds of `vllm --version`.
"""

import argparse
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

KV_CACHE_BYTES = 256 << 20
VLLM = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Start(NamedTuple):
    """What one start cost."""

    seconds: float
    """From the command to /health 200."""
    beyond: int
    """Bytes of all processes after one short request, less weights and KV cache; pages they share count once."""
    peak: int
    """Most bytes the engine had in memory, pages of the model's file included."""
    weights: int
    idle: float
    """Processor seconds of all processes in a quiet second after the request."""


def family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def processor_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def wait_until_quiet(processes: list[psutil.Process]) -> None:
    """What an idle engine still does for later is over."""
    used = processor_seconds(processes)
    while True:
        time.sleep(0.3)
        before, used = used, processor_seconds(processes)
        if used - before < 0.02:
            return


def peak_bytes(processes: list[psutil.Process]) -> int:
    """Of the process with the highest peak, the engine."""
    peaks = [re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{p.pid}/status").read_text()) for p in processes]
    return max(int(peak[1]) << 10 for peak in peaks if peak)


def weight_bytes(log: str) -> int:
    match = re.search(r"(\d+) MiB of weights", log)
    return int(match.group(1)) << 20 if match else 0


def one_start(model: str, flags: list[str], path: Path) -> Start:
    port = free_port()
    begun = time.perf_counter()
    with path.open("wb") as log:
        command = [*VLLM, "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
        command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=60) as client:
        while True:
            try:
                if client.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                if process.poll() is not None:
                    raise SystemExit(path.read_text()) from None
                time.sleep(0.005)
        ready = time.perf_counter() - begun
        peak = peak_bytes(family(process.pid))
        client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4}).raise_for_status()
    processes, weights = family(process.pid), weight_bytes(path.read_text())
    wait_until_quiet(processes)
    used = processor_seconds(processes)
    time.sleep(1)
    idle = processor_seconds(processes) - used
    memory = sum(p.memory_full_info().pss for p in processes)
    start = Start(ready, memory - weights - KV_CACHE_BYTES, peak, weights, idle)
    process.send_signal(signal.SIGTERM)
    process.wait(10)
    return start


def version_seconds() -> float:
    begun = time.perf_counter()
    subprocess.run([*VLLM, "--version"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--log", type=Path, default="/tmp/vllm-startup.log", help="Where the server logs go.")
    args, flags = parser.parse_known_args()
    flags = [f for f in flags if f != "--"]
    one_start(args.model, flags, args.log)  # warms the file cache
    runs = [one_start(args.model, flags, args.log) for _ in range(args.runs)]
    times = sorted(run.seconds for run in runs)
    median = statistics.median(times)
    print(f"start to ready: median {median:.2f} s of {args.runs} (from {times[0]:.2f} to {times[-1]:.2f})")
    beyond = statistics.median(run.beyond for run in runs)
    print(f"memory beyond weights and KV cache, all processes: {beyond / 2**20:.0f} MiB")
    peak, weights = statistics.median(run.peak for run in runs), runs[0].weights
    print(f"peak of the engine: {peak / 2**20:.0f} MiB, {peak / max(weights, 1):.2f} x weights ({weights >> 20} MiB)")
    print(f"processor time while idle: {statistics.median(run.idle for run in runs):.1%} of a core")
    print(f"vllm --version: median {statistics.median(version_seconds() for _ in range(args.runs)):.2f} s")


if __name__ == "__main__":
    main()
