#!/usr/bin/env python3
"""Our packed bf16 matrix product against torch's, in turn, on shapes of a decode and a prefill step.

linear.py [--threads N]    prints microseconds, GB/s of weights read, GFLOP/s, and the ratio to torch
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_clone import kernels
from vllm_clone.platforms.cpu import num_usable_cores

SHAPES = [
    (1, 576, 576),
    (1, 3072, 576),
    (1, 576, 1536),
    (1, 49152, 576),
    (1, 11264, 2048),
    (16, 3072, 576),
    (256, 3072, 576),
    (512, 576, 576),
    (512, 3072, 576),
    (320, 576, 1536),
]
WORKING_SET = 6e7
"""Elements of weights to go through in turn, so that they come from memory and not from a cache."""


SETTLE_SECONDS = 0.05


def seconds(run: Callable[[int], object], repeats: int) -> float:
    """Of one call, after a while of the same: the other library's threads still spin when their last call is over."""
    begun, i = time.perf_counter(), 0
    while time.perf_counter() - begun < SETTLE_SECONDS:
        run(i)
        i += 1
    begun = time.perf_counter()
    for i in range(repeats):
        run(i)
    return (time.perf_counter() - begun) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    print(f"{kernels.active_level()}, {args.threads} threads; rows, outputs, inputs: ours | torch | ratio")
    for rows, n, k in SHAPES:
        copies = max(1, int(WORKING_SET / (n * k)))
        weights = [torch.randn(n, k).bfloat16() for _ in range(copies)]
        packed = [kernels.pack_linear(w) for w in weights]
        x = torch.randn(rows, k).bfloat16()
        repeats = max(8, int(2e8 / (n * k * max(rows / 8, 1))))
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(args.rounds):
            ours.append(seconds(lambda i: kernels.linear(x, packed[i % copies], n, None), repeats))  # noqa: B023
            theirs.append(seconds(lambda i: F.linear(x, weights[i % copies]), repeats))  # noqa: B023
        a, b = statistics.median(ours), statistics.median(theirs)
        speed = f"{n * k * 2 / a / 1e9:6.1f} GB/s {2 * rows * n * k / a / 1e9:6.0f} GFLOP/s"
        print(f"{rows:4} {n:6} {k:5}: {a * 1e6:8.0f} µs {speed} | {b * 1e6:8.0f} µs | {b / a:.2f}x")


if __name__ == "__main__":
    main()
