#!/usr/bin/env python3
"""Many streams of random lengths with random aborts against a running server.

    soak.py --url http://127.0.0.1:8000 [--requests 2000 | --minutes 10] [--streams 64] [--aborts 0.25] [--pid SERVER_PID]

Give the server a small KV cache (for a toy model --kv-cache-memory-bytes 16M): its pages count as resident once they
have been used, and a large one would still be filling up.

Prints how the requests ended, the server's own counters afterwards and, with --pid, the resident memory
of the server's process tree on the way. Exits 1 when a request was lost, a KV block leaked, or memory grew
by more than --growth between a quarter of the run and its end. With --minutes it prints a row a minute, of memory
and of the median time between a stream's events, and also fails when the latter grew by more than --drift between the
second quarter of the run and the last.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from vllm_clone.benchmarks.serve.http import Client, HTTPError

DONE = b"data: [DONE]"


@dataclass
class Row:
    """A stretch of the run: what ended in it, and the server's resident bytes at its end."""

    done: int
    gap_ms: float
    memory: int


@dataclass
class Outcome:
    """Counts of how requests ended, each stream's seconds per event since the last row, and the rows."""

    finished: int = 0
    aborted: int = 0
    failed: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.finished + self.aborted + len(self.failed)

    def close_row(self, memory: int) -> Row:
        gap = statistics.median(self.gaps) * 1e3 if self.gaps else float("nan")
        self.rows.append(Row(self.done, gap, memory))
        self.gaps.clear()
        return self.rows[-1]


def resident(pid: int) -> int:
    """Resident bytes of a process and everything below it."""
    root = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])


class Stream:
    """One request; it may be given up after some events."""

    def __init__(self, client: Client, model: str, rng: random.Random, aborts: float) -> None:
        limit = rng.randrange(1, 120)
        self._abort_after = rng.randrange(1, limit + 1) if rng.random() < aborts else None
        prompt = [rng.randrange(10, 5000) for _ in range(rng.randrange(1, 300))]
        body = {"model": model, "prompt": prompt, "max_tokens": limit, "temperature": 1.0, "stream": True}
        self._tail = b""
        self._times: list[float] = []
        self._task = asyncio.ensure_future(
            client.stream("POST", "/v1/completions", json.dumps(body).encode(), {}, self._take)
        )

    def _take(self, status: int, data: bytes, now: float) -> None:
        self._tail = (self._tail + data)[-400:]
        self._times.append(now)
        is_over = self._tail.rstrip().endswith(DONE)
        if self._abort_after is not None and len(self._times) >= self._abort_after and not is_over:
            self._task.cancel()

    async def run(self, outcome: Outcome) -> None:
        try:
            status, _ = await self._task
        except asyncio.CancelledError:
            outcome.aborted += 1
            return
        except HTTPError as error:
            outcome.failed.append(str(error))
            return
        if status == 200 and self._tail.rstrip().endswith(DONE):
            outcome.finished += 1
            if len(self._times) > 2:
                outcome.gaps.append((self._times[-1] - self._times[0]) / (len(self._times) - 1))
        else:
            outcome.failed.append(f"{status} {self._tail.decode(errors='replace')}")


async def soak(args: argparse.Namespace) -> Outcome:
    rng = random.Random(args.seed)
    outcome = Outcome()
    begun = time.monotonic()

    def tickets() -> Iterator[None]:
        while time.monotonic() - begun < args.minutes * 60 if args.minutes else outcome.done < args.requests:
            yield

    issued = iter(range(args.requests)) if not args.minutes else tickets()
    client = Client(args.url)
    try:
        model = json.loads((await client.fetch("GET", "/v1/models"))[1])["data"][0]["id"]

        async def worker() -> None:
            for _ in issued:
                await Stream(client, model, rng, args.aborts).run(outcome)
                if args.pid and not args.minutes and outcome.done % 50 == 0:
                    outcome.close_row(resident(args.pid))

        clock = asyncio.create_task(every_minute(args, outcome)) if args.minutes else None
        await asyncio.gather(*(worker() for _ in range(args.streams)))
        if clock is not None:
            clock.cancel()
        await settled(client)
    finally:
        client.close()
    return outcome


async def every_minute(args: argparse.Namespace, outcome: Outcome) -> None:
    """Close and print a row a minute, or ten in a shorter run."""
    pause = min(60.0, args.minutes * 6.0)
    print(f"{'minute':>6} {'finished':>9} {'aborted':>8} {'failed':>7} {'gap ms':>8} {'resident MiB':>13}")
    while True:
        await asyncio.sleep(pause)
        row = outcome.close_row(resident(args.pid) if args.pid else 0)
        minute = len(outcome.rows) * pause / 60
        counts = f"{outcome.finished:9} {outcome.aborted:8} {len(outcome.failed):7}"
        print(f"{minute:6.1f} {counts} {row.gap_ms:8.2f} {row.memory / 2**20:13.1f}", flush=True)


async def metric(client: Client, name: str) -> float:
    text = (await client.fetch("GET", "/metrics"))[1].decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


async def settled(client: Client, timeout: float = 10.0) -> None:
    """Wait until no request runs and no KV block is taken."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        running = await metric(client, "vllm:num_requests_running")
        usage = await metric(client, "vllm:kv_cache_usage_perc")
        if running == 0 and usage == 0:
            return
        await asyncio.sleep(0.05)
    raise SystemExit(f"still running {running:g} requests, {usage:.2%} of the KV blocks taken, {timeout:g} s later")


def memory_is_flat(rows: list[Row], growth: float) -> bool:
    """Whether the end holds hardly more than after a quarter of the requests."""
    early = next(row.memory for row in rows if row.done >= rows[-1].done // 4)
    late = rows[-1].memory
    print(f"resident memory: {early / 2**20:.1f} MiB at a quarter, {late / 2**20:.1f} MiB at the end")
    return late <= early * (1 + growth)


def pace_is_steady(rows: list[Row], drift: float) -> bool:
    """Whether the last quarter's events come about as soon one after the other as the second quarter's."""
    quarter = max(len(rows) // 4, 1)
    early = statistics.median(row.gap_ms for row in rows[quarter : 2 * quarter])
    late = statistics.median(row.gap_ms for row in rows[-quarter:])
    print(f"time between events: {early:.2f} ms in the second quarter, {late:.2f} ms in the last")
    return late <= early * (1 + drift)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=0.0, help="Run so long, instead of for --requests.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--aborts", type=float, default=0.25, help="Share of requests that are given up.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="Process id of the server, to watch its memory.")
    parser.add_argument("--growth", type=float, default=0.05, help="Allowed growth of memory, as a fraction.")
    parser.add_argument("--drift", type=float, default=0.15, help="Allowed growth of the time between events.")
    args = parser.parse_args()
    begun = time.monotonic()
    outcome = asyncio.run(soak(args))
    seconds = time.monotonic() - begun
    print(f"{outcome.finished} finished, {outcome.aborted} aborted, {len(outcome.failed)} failed in {seconds:.1f} s")
    for reason in sorted(set(outcome.failed))[:5]:
        print("failed:", reason)
    ok = not outcome.failed and (args.minutes > 0 or outcome.done == args.requests)
    if args.pid and outcome.rows:
        ok &= memory_is_flat(outcome.rows, args.growth)
    if args.minutes and len(outcome.rows) >= 4:
        ok &= pace_is_steady(outcome.rows, args.drift)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
