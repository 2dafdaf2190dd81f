#!/usr/bin/env python3
"""What this machine can do at most: bytes read per second from memory and from the last-level cache, and FLOP/s.

    limits.py [--threads N] [--gigabytes 1.25]

Reading is adding up 64-bit integers of a buffer, which reads every byte once and computes next to nothing; a
hand-written AVX-512 loop with prefetch reads no faster. FLOP/s is the better of our packed matrix product and torch's
on a shape that reuses every weight many times. The best of several rounds counts: a limit, not an average.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_clone import kernels
from vllm_clone.platforms.cpu import num_usable_cores

ROUNDS = 9
CACHE_SECONDS = 0.1
"""Of reading from the cache; a short buffer needs many passes to be timed."""
MATRIX = (512, 2048, 2048)
"""Rows, outputs, inputs of the matrix product."""


@dataclass(frozen=True)
class Limits:
    """Bytes per second from memory and cache, FLOP/s by type."""

    threads: int
    memory: float
    cache: float
    flops_bf16: float
    flops_f32: float


def best_seconds(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Shortest of several runs, after one that does not count."""
    run()
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begun)
    return best


def read_bandwidth(size: int, rounds: int = ROUNDS) -> float:
    """Bytes per second of reading a buffer again and again, with torch's number of threads."""
    buffer = torch.ones(size // 8, dtype=torch.int64)
    return size / best_seconds(buffer.sum, rounds)


def cache_bytes(level: int) -> int:
    """Size of the first core's cache of a level; 0 when the system does not tell."""
    for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (entry / "level").read_text().strip() == str(level) and "nstruction" not in (entry / "type").read_text():
            return int((entry / "size").read_text().strip().rstrip("K")) << 10
    return 0


def cached_buffer_bytes(threads: int) -> int:
    """A size that fills the private caches several times and still fits half the last-level cache."""
    private, shared = cache_bytes(2) or 1 << 20, cache_bytes(3) or 32 << 20
    return max(min(shared // 2, 16 * private * threads), 2 * private * threads)


def flops(dtype: torch.dtype) -> float:
    """FLOP/s of the faster matrix product, ours or torch's."""
    rows, outputs, inputs = MATRIX
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    packed = kernels.pack_linear(weight)
    seconds = min(
        best_seconds(lambda: kernels.linear(x, packed, outputs, None)),
        best_seconds(lambda: torch.nn.functional.linear(x, weight)),
    )
    return 2 * rows * outputs * inputs / seconds


def measure(threads: int, memory_bytes: int) -> Limits:
    """The limits with a number of threads, which stays set."""
    kernels.set_num_threads(threads)
    torch.set_num_threads(threads)
    small = cached_buffer_bytes(threads)
    cached = read_bandwidth(small, rounds=max(ROUNDS, int(CACHE_SECONDS * 20e9 / small)))
    return Limits(threads, read_bandwidth(memory_bytes), cached, flops(torch.bfloat16), flops(torch.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--gigabytes", type=float, default=1.25, help="Size of the buffer in memory.")
    args = parser.parse_args()
    size = int(args.gigabytes * 2**30)
    print(f"{kernels.active_level()}; memory: {size >> 20} MiB, cache: {cached_buffer_bytes(args.threads) >> 10} KiB")
    print("threads   memory GB/s   cache GB/s   bf16 GFLOP/s   f32 GFLOP/s")
    for threads in sorted({1, args.threads}):
        limit = measure(threads, size)
        print(
            f"{threads:7} {limit.memory / 1e9:13.1f} {limit.cache / 1e9:12.1f} {limit.flops_bf16 / 1e9:14.0f}"
            f" {limit.flops_f32 / 1e9:13.0f}"
        )


if __name__ == "__main__":
    main()
