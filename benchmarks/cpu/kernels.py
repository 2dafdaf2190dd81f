#!/usr/bin/env python3
"""Speed of the CPU kernels beside what the memory of this machine gives, measured in turn in one run.

kernels.py [--threads N] [--megabytes N]

Prints the read bandwidth, then for one input row of each weight format and for attention over a paged cache the
microseconds, the GB/s read (and their share of that bandwidth) and GFLOP/s; then what decoding rows gain by sharing a
prefix. Weights and caches are larger together
than --megabytes, so that they come from memory; use a size above the last-level cache.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from vllm_clone import kernels
from vllm_clone.hub.gguf import BLOCK_SIZES, GGMLType
from vllm_clone.kernels import GGUFMatrix
from vllm_clone.platforms.cpu import num_usable_cores

OUTPUTS, INPUTS = 1536, 2048
HEADS, KEY_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
DECODES = [(1, 600), (1, 2048), (32, 600), (32, 2048)]
PREFILLS = [(256, 256), (512, 2048), (2048, 2048)]
SHARED = [(2, 1536), (8, 1536), (32, 1024)]
"""Rows that decode, and the keys that they have in common, with 64 more of their own each."""


def median_seconds(run: Callable[[int], object], rounds: int) -> float:
    run(0)
    times = []
    for i in range(rounds):
        begun = time.perf_counter()
        run(i)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def read_bandwidth(size: int) -> float:
    """Bytes per second of adding up a buffer larger than the caches."""
    buffer = torch.ones(size // 8, dtype=torch.int64)
    return size / median_seconds(lambda _: buffer.sum(), 9)


def linear_layers(size: int, bandwidth: float) -> None:
    print(
        f"\none row times [{OUTPUTS}, {INPUTS}]        packed bytes       µs     GB/s   of bandwidth   16 rows GFLOP/s"
    )
    x, many = torch.randn(1, INPUTS).bfloat16(), torch.randn(16, INPUTS).bfloat16()
    for name in ["BF16", "Q8_0", "Q6_K", "Q5_1", "Q4_1", "Q4_0", "Q4_K"]:
        kind = GGMLType[name]
        if kind in kernels.GGUF_PACKABLE:
            per_block, block_bytes = BLOCK_SIZES[kind]
            raw = torch.randint(0, 256, (OUTPUTS * INPUTS // per_block * block_bytes,), dtype=torch.uint8)
            first = kernels.pack_gguf_linear(raw, kind, (OUTPUTS, INPUTS))
            run = lambda x, w, kind=kind: kernels.gguf_linear(x, [GGUFMatrix(w, kind, OUTPUTS)], None)  # noqa: E731
        else:
            first = kernels.pack_linear(torch.randn(OUTPUTS, INPUTS).bfloat16())
            run = lambda x, w: kernels.linear(x, w, OUTPUTS, None)  # noqa: E731
        weights = [first.clone() for _ in range(1 + size // first.nbytes)]
        one = median_seconds(lambda i: run(x, weights[i % len(weights)]), 3 * len(weights))  # noqa: B023
        batch = median_seconds(lambda i: run(many, weights[i % len(weights)]), 20)  # noqa: B023
        speed = first.nbytes / one
        rate = 2 * 16 * OUTPUTS * INPUTS / batch
        print(
            f"{name:28} {first.nbytes:16} {one * 1e6:8.0f} {speed / 1e9:8.1f} {speed / bandwidth:14.0%}"
            f" {rate / 1e9:16.0f}"
        )


def attention(size: int, bandwidth: float) -> None:
    print(f"\nattention, {HEADS} heads on {KEY_HEADS}, head size {HEAD_SIZE}, bf16")
    page_bytes = 2 * KEY_HEADS * BLOCK_SIZE * HEAD_SIZE * 2
    cache = torch.randn(size // page_bytes, 2, KEY_HEADS, BLOCK_SIZE, HEAD_SIZE).bfloat16()
    for queries, requests, length in [(1, r, n) for r, n in DECODES] + [(q, 1, n) for q, n in PREFILLS]:
        blocks = -(-length // BLOCK_SIZE)
        order = torch.randperm(len(cache)).int().repeat(1 + requests * blocks // len(cache))
        tables = [
            order.roll(i * requests * blocks)[: requests * blocks].view(requests, blocks).contiguous()
            for i in range(1 + len(cache) // (requests * blocks))
        ]
        q = torch.randn(requests * queries, HEADS, HEAD_SIZE).bfloat16()
        out = torch.empty_like(q)
        starts, lengths = torch.arange(requests + 1).int() * queries, torch.full((requests,), length).int()
        run = lambda i: kernels.paged_attention(  # noqa: E731
            q, cache, tables[i % len(tables)], starts, lengths, scale=HEAD_SIZE**-0.5, out_THD=out  # noqa: B023
        )  # fmt: skip
        seconds = median_seconds(run, 15)
        read = requests * blocks * page_bytes / seconds
        pairs = requests * HEADS * (queries * length - queries * (queries - 1) / 2)
        what = f"{requests} × {queries} queries, {length} keys"
        print(
            f"{what:32} {seconds * 1e6:8.0f} µs {read / 1e9:7.1f} GB/s {read / bandwidth:5.0%}"
            f" {4 * HEAD_SIZE * pairs / seconds / 1e9:7.0f} GFLOP/s"
        )


def shared_prefixes(size: int) -> None:
    """The same rows with and without common pages, in turn."""
    print("\nrows that decode behind a common prefix       apart   together   ratio")
    page_bytes = 2 * KEY_HEADS * BLOCK_SIZE * HEAD_SIZE * 2
    cache = torch.randn(size // page_bytes, 2, KEY_HEADS, BLOCK_SIZE, HEAD_SIZE).bfloat16()
    for rows, prefix in SHARED:
        blocks, common = (prefix + 64) // BLOCK_SIZE, prefix // BLOCK_SIZE
        order = torch.randperm(len(cache)).int().repeat(1 + 2 * rows * blocks // len(cache))
        apart = [order.roll(i * rows * blocks)[: rows * blocks].view(rows, blocks).contiguous() for i in range(30)]
        together = [table.clone() for table in apart]
        for table in together:
            table[:, :common] = table[0, :common].clone()
        q = torch.randn(rows, HEADS, HEAD_SIZE).bfloat16()
        out = torch.empty_like(q)
        starts, lengths = torch.arange(rows + 1).int(), torch.full((rows,), prefix + 64).int()
        seconds = []
        for tables in (apart, together):
            run = lambda i, tables=tables: kernels.paged_attention(  # noqa: E731
                q, cache, tables[i % 30], starts, lengths, scale=HEAD_SIZE**-0.5, out_THD=out  # noqa: B023
            )  # fmt: skip
            seconds.append(median_seconds(run, 60))
        print(
            f"{rows:3} rows, {prefix} common keys {seconds[0] * 1e6:20.0f} µs {seconds[1] * 1e6:7.0f} µs"
            f" {seconds[0] / seconds[1]:7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--megabytes", type=int, default=256)
    args = parser.parse_args()
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    size = args.megabytes << 20
    bandwidth = read_bandwidth(size)
    print(f"{kernels.active_level()}, {args.threads} threads; reading {args.megabytes} MB: {bandwidth / 1e9:.1f} GB/s")
    linear_layers(size, bandwidth)
    attention(size, bandwidth)
    shared_prefixes(size)


if __name__ == "__main__":
    main()
