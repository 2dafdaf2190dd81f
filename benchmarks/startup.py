#!/usr/bin/env python3
"""How soon a server is ready, and what it costs beside weights and KV cache.

    startup.py MODEL [--runs 5] [-- flags of vllm serve]

Prints the median time from the command to /health 200, the median of `vllm --version`, and the resident memory of all
processes after one request, less weights and the KV cache blocks that request used.
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

import httpx
import psutil

VLLM = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def private_bytes(pid: int) -> int:
    """Proportional set size of a process and its children: shared pages are divided among their users."""
    root = psutil.Process(pid)
    return sum(p.memory_full_info().pss for p in [root, *root.children(recursive=True)])


def weight_bytes(log: str) -> int:
    match = re.search(r"(\d+) MiB of weights", log)
    return int(match.group(1)) << 20 if match else 0


def one_start(model: str, flags: list[str], path: Path) -> tuple[float, int]:
    """Seconds to ready, and bytes beyond the weights after one short request."""
    port = free_port()
    begun = time.perf_counter()
    with path.open("wb") as log:
        command = [*VLLM, "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
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
        client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4}).raise_for_status()
        memory = private_bytes(process.pid) - weight_bytes(path.read_text())
    process.send_signal(signal.SIGTERM)
    process.wait(10)
    return ready, memory


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
    times = sorted(t for t, _ in runs)
    median = statistics.median(times)
    print(f"start to ready: median {median:.2f} s of {args.runs} (from {times[0]:.2f} to {times[-1]:.2f})")
    print(f"memory beyond weights, all processes: {statistics.median(m for _, m in runs) / 2**20:.0f} MiB")
    print(f"vllm --version: median {statistics.median(version_seconds() for _ in range(args.runs)):.2f} s")


if __name__ == "__main__":
    main()
