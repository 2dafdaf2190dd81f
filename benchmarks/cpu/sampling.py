#!/usr/bin/env python3
"""Time of sampling one row of logits, by the CPU kernels and by their reference in plain torch.

sampling.py [--threads N] [--vocab N] [--rounds N]

Logits are drawn from a normal distribution of deviation 3, about as flat as a language model's. Each line is one way
to sample and one batch size; it gives the microseconds per row of both, medians of --rounds calls in turn, of all that
the sampler does after the model: edits, filters, the draw and the scores.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from vllm_clone import kernels
from vllm_clone.kernels import reference
from vllm_clone.platforms.cpu import num_usable_cores
from vllm_clone.sample import Sampler, SamplingBatch, SamplingRows
from vllm_clone.sampling_params import SamplingParams

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=1),
    "top-p 0.95": SamplingParams(temperature=1, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=1, min_p=0.05),
    "top-k 50, penalties": SamplingParams(temperature=1, top_k=50, repetition_penalty=1.1, presence_penalty=0.5),
    "top-k 50, top-p 0.95": SamplingParams(temperature=1, top_k=50, top_p=0.95),
    "greedy, 5 logprobs": SamplingParams(temperature=0, logprobs=5),
}
BATCHES = [1, 16, 64]
PROMPT, OUTPUTS = 500, 100


def make_batch(params: SamplingParams, rows: int, vocab: int) -> SamplingBatch:
    rng = np.random.default_rng(0)
    state = SamplingRows(rows, vocab)
    for seed in range(rows):
        state.add(params, seed, rng.integers(0, vocab, PROMPT), rng.integers(0, vocab, OUTPUTS).tolist())
    return state.select(None, np.full(rows, PROMPT + OUTPUTS))


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def measure(params: SamplingParams, rows: int, vocab: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a step's sampling by the kernels and by plain torch."""
    batch, sampler = make_batch(params, rows, vocab), Sampler()
    logits = torch.randn(rows, vocab) * 3

    def by_kernels() -> object:
        return sampler(fresh, batch).token_ids

    def by_torch() -> object:
        with mock.patch("vllm_clone.sample.adjust.kernels", reference):
            return sampler(fresh, batch).token_ids

    times: dict[Callable[[], object], list[float]] = {by_kernels: [], by_torch: []}
    for _ in range(1 + rounds):
        for run, taken in times.items():
            fresh = logits.clone()
            taken.append(seconds(run))
    first, second = (statistics.median(taken[1:]) for taken in times.values())
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{kernels.active_level()}, {args.threads} threads, {args.vocab} tokens; µs per row")
    print(f"\n{'':24}{'batch':>8}{'kernels':>10}{'torch':>10}{'ratio':>8}")
    for name, params in CASES.items():
        for rows in BATCHES:
            kernel, plain = (1e6 * t / rows for t in measure(params, rows, args.vocab, args.rounds))
            print(f"{name:24}{rows:8}{kernel:10.1f}{plain:10.1f}{plain / kernel:8.1f}")


if __name__ == "__main__":
    main()
