"""Cost of the scheduler alone: milliseconds of ``schedule()`` + ``update_from_output()`` per step.

    python benchmarks/scheduler.py [--requests 256] [--steps 500] [--prompt-len 512] [--window 0] [--no-caching]

All requests decode; the model is replaced by one fixed token per request. Prints medians and tails of the step
time, the cost per request, and the cost of admitting the prompts (hashing and block allocation included).
"""

import argparse
import gc
import statistics
import time

from vllm_clone.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm_clone.config.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from vllm_clone.core.sched.scheduler import Scheduler
from vllm_clone.messages import EngineCoreRequest
from vllm_clone.sampling_params import SamplingParams
from vllm_clone.step import ModelRunnerOutput

BLOCK_SIZE = 16


def make_scheduler(args: argparse.Namespace) -> Scheduler:
    max_model_len = args.prompt_len + args.steps + 8
    groups = [KVCacheGroup(("full",), FullAttentionSpec(BLOCK_SIZE, 8, 128, "bfloat16"))]
    if args.window:
        spec = SlidingWindowSpec(BLOCK_SIZE, 8, 128, "bfloat16", args.window)
        groups += [KVCacheGroup((f"window{i}",), spec) for i in range(args.window_groups)]
    blocks = len(groups) * args.requests * (max_model_len // BLOCK_SIZE + 2) + 1
    config = VllmConfig(
        model_config=ModelConfig(max_model_len=max_model_len),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=not args.no_caching),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=args.requests),
    )
    return Scheduler(config, KVCacheConfig(blocks, tuple(groups)))


def run(args: argparse.Namespace) -> None:
    scheduler = make_scheduler(args)
    started = time.perf_counter()
    for i in range(args.requests):
        prompt = [(i * 7919 + j) % 50_000 for j in range(args.prompt_len)]
        params = SamplingParams(max_tokens=args.steps + 8, ignore_eos=True)
        scheduler.add_request(EngineCoreRequest(f"request-{i:05d}", prompt, params, float(i)))
    added = time.perf_counter()
    while any(r.num_output_tokens == 0 for r in scheduler.requests.values()):
        step = scheduler.schedule()
        scheduler.update_from_output(step, ModelRunnerOutput(sampled(scheduler)))
    admitted = time.perf_counter()

    times, halves = [], []
    gc.collect()
    gc.freeze()
    for _ in range(args.steps // 2):
        t0 = time.perf_counter()
        step = scheduler.schedule()
        t1 = time.perf_counter()
        result = ModelRunnerOutput({request_id: [7] for request_id in step.num_scheduled_tokens})
        t2 = time.perf_counter()
        scheduler.update_from_output(step, result)
        t3 = time.perf_counter()
        times.append(1e3 * (t1 - t0 + t3 - t2))
        halves.append((1e3 * (t1 - t0), 1e3 * (t3 - t2)))
    median = statistics.median(times)
    tail = statistics.quantiles(times, n=100)[98]
    print(f"{args.requests} requests, prompt {args.prompt_len}, {len(scheduler.kv.groups)} KV group(s)")
    print(f"add:            {1e6 * (added - started) / args.requests:8.1f} us per request")
    print(f"prefill steps:  {1e6 * (admitted - added) / args.requests:8.1f} us per request")
    per_request = 1e3 * median / args.requests
    print(f"decode step:    {median:8.3f} ms median, {tail:.3f} ms p99, {per_request:.2f} us per request")
    print(f"  schedule      {statistics.median(h[0] for h in halves):8.3f} ms")
    print(f"  update        {statistics.median(h[1] for h in halves):8.3f} ms")


def sampled(scheduler: Scheduler) -> dict[str, list[int]]:
    """One token for every request whose prompt is computed."""
    return {r.request_id: [7] for r in scheduler.running if r.num_computed_tokens >= r.num_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--window", type=int, default=0, help="add sliding-window groups of this window")
    parser.add_argument("--window-groups", type=int, default=1)
    parser.add_argument("--no-caching", action="store_true")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
