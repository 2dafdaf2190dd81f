#!/usr/bin/env python3
"""Many streams of random lengths with random aborts against a running server.

    soak.py --url http://127.0.0.1:8000 --requests 2000 --streams 64 [--pid SERVER_PID]

Give the server a small KV cache (for a toy model --kv-cache-memory-bytes 16M): its pages count as resident once they
have been used, and a large one would still be filling up.

Prints how the requests ended, the server's own counters afterwards and, with --pid, the resident memory
of the server's process tree on the way. Exits 1 when a request was lost, a KV block leaked, or memory grew
by more than --growth between a quarter of the requests and the end.
"""

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field

import httpx
import psutil


@dataclass
class Outcome:
    """Counts of how requests ended, and (requests done, resident bytes) samples."""

    finished: int = 0
    aborted: int = 0
    failed: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.finished + self.aborted + len(self.failed)


def resident(pid: int) -> int:
    """Resident bytes of a process and everything below it."""
    root = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])


async def one(client: httpx.AsyncClient, model: str, rng: random.Random, outcome: Outcome) -> None:
    """One stream; a quarter of them are given up after a few chunks."""
    prompt = [rng.randrange(10, 5000) for _ in range(rng.randrange(1, 300))]
    limit = rng.randrange(1, 120)
    abort_after = rng.randrange(1, limit + 1) if rng.random() < 0.25 else None
    body = {"model": model, "prompt": prompt, "max_tokens": limit, "temperature": 1.0, "stream": True}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            last, chunks = "", 0
            async for line in response.aiter_lines():
                if line:
                    last, chunks = line, chunks + 1
                if abort_after is not None and chunks >= abort_after and last != "data: [DONE]":
                    outcome.aborted += 1
                    return
        if response.status_code == 200 and last == "data: [DONE]":
            outcome.finished += 1
        else:
            outcome.failed.append(f"{response.status_code} {last[:200]}")
    except httpx.HTTPError as error:
        outcome.failed.append(repr(error))


async def soak(args: argparse.Namespace) -> Outcome:
    rng = random.Random(args.seed)
    outcome = Outcome()
    remaining = iter(range(args.requests))
    limits = httpx.Limits(max_connections=args.streams + 8)
    async with httpx.AsyncClient(base_url=args.url, timeout=120, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def worker() -> None:
            for _ in remaining:
                await one(client, model, rng, outcome)
                if args.pid and outcome.done % 50 == 0:
                    outcome.memory.append((outcome.done, resident(args.pid)))

        await asyncio.gather(*(worker() for _ in range(args.streams)))
        await settled(client)
    return outcome


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


async def settled(client: httpx.AsyncClient, timeout: float = 10.0) -> None:
    """Wait until no request runs and no KV block is taken."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        running = await metric(client, "vllm:num_requests_running")
        usage = await metric(client, "vllm:kv_cache_usage_perc")
        if running == 0 and usage == 0:
            return
        await asyncio.sleep(0.05)
    raise SystemExit(f"still running {running:g} requests, {usage:.2%} of the KV blocks taken, {timeout:g} s later")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="Process id of the server, to watch its memory.")
    parser.add_argument("--growth", type=float, default=0.05, help="Allowed growth of memory, as a fraction.")
    args = parser.parse_args()
    begun = time.monotonic()
    outcome = asyncio.run(soak(args))
    seconds = time.monotonic() - begun
    print(f"{outcome.finished} finished, {outcome.aborted} aborted, {len(outcome.failed)} failed in {seconds:.1f} s")
    for reason in sorted(set(outcome.failed))[:5]:
        print("failed:", reason)
    ok = not outcome.failed and outcome.done == args.requests
    if outcome.memory:
        early = next(bytes_ for done, bytes_ in outcome.memory if done >= args.requests // 4)
        late = outcome.memory[-1][1]
        print(f"resident memory: {early / 2**20:.1f} MiB at a quarter, {late / 2**20:.1f} MiB at the end")
        ok = ok and late <= early * (1 + args.growth)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
