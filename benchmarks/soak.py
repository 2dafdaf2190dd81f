#!/usr/bin/env python3
"""Many streams of random lengths with random aborts against a running server.

    soak.py [--url http://127.0.0.1:8000] [--minutes 10 | --requests 2000] [--streams 64] [--aborts 0.25] [--pid PID]

PID is the server's process; with it the memory of its process tree is watched. Give the server a small KV cache (for a
toy model --kv-cache-memory-bytes 16M): its pages count as resident once they have been used, and a large one would
still be filling up.

Prints ten rows or one a minute: how requests ended so far, the median time between a stream's events, and memory. Then
the server must be idle by its own counters, with no KV block taken. Exits 1 when a request was lost, a block leaked,
memory grew by more than --growth between a quarter of the run and its end, or the time between events by more than
--drift between the second quarter and the last. Short runs with --requests are too uneven for a limit on the latter.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

import psutil

from vllm_clone.benchmarks.serve.http import Client, HTTPError
from vllm_clone.benchmarks.serve.run import runner

DONE = b"data: [DONE]"
TAIL_BYTES = 400
"""Of an answer, kept to see how it ended."""
MAX_FAILED = 100
"""Failures after which the rest of the run says nothing new."""
ROWS = 10


@dataclass
class Row:
    """A stretch of the run: what had ended at its end, median ms between events in it, the server's resident bytes."""

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

    def close_row(self, memory: int) -> None:
        """Begin a new row, and print the one that ends."""
        gap = statistics.median(self.gaps) * 1e3 if self.gaps else float("nan")
        self.rows.append(Row(self.done, gap, memory))
        self.gaps.clear()
        counts = f"{self.finished:9} {self.aborted:8} {len(self.failed):7}"
        print(f"{len(self.rows):4} {counts} {gap:8.2f} {memory / 2**20:13.1f}", flush=True)


def resident(pid: int) -> int:
    """Resident bytes of a process and everything below it.

    Raises:
        SystemExit: there is no such process.
    """
    try:
        root = psutil.Process(pid)
        return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])
    except psutil.NoSuchProcess as error:
        raise SystemExit(f"the server's process is gone: {error}") from error


class Stream:
    """One request; it may be given up after some events."""

    def __init__(self, client: Client, model: str, rng: random.Random, aborts: float) -> None:
        limit = rng.randrange(1, 120)
        self._abort_after = rng.randrange(1, limit + 1) if rng.random() < aborts else None
        prompt = [rng.randrange(10, 5000) for _ in range(rng.randrange(1, 300))]
        body = {"model": model, "prompt": prompt, "max_tokens": limit, "temperature": 1.0, "stream": True}
        self._tail = b""
        self._times: list[float] = []
        self._gave_up = False
        self._task = asyncio.ensure_future(
            client.stream("POST", "/v1/completions", json.dumps(body).encode(), {}, self._take)
        )

    def _take(self, status: int, data: bytes, now: float) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._times.append(now)
        if self._abort_after is not None and len(self._times) >= self._abort_after and not self._is_over:
            self._gave_up = True
            self._task.cancel()

    @property
    def _is_over(self) -> bool:
        return self._tail.rstrip().endswith(DONE)

    async def run(self, outcome: Outcome) -> None:
        """Wait for the end and count it.

        Raises:
            asyncio.CancelledError: the whole run is cancelled.
        """
        try:
            status, _ = await self._task
        except asyncio.CancelledError:
            if not self._gave_up:
                raise
            outcome.aborted += 1
            return
        except HTTPError as error:
            outcome.failed.append(str(error))
            return
        if status == 200 and self._is_over:
            outcome.finished += 1
            if len(self._times) > 2:
                outcome.gaps.append((self._times[-1] - self._times[0]) / (len(self._times) - 1))
        else:
            outcome.failed.append(f"{status} {self._tail.decode(errors='replace')}")


class Soak:
    """The run: streams that each send one request after the other, and a row now and then."""

    def __init__(self, args: argparse.Namespace, client: Client) -> None:
        self._args = args
        self._client = client
        self._rng = random.Random(args.seed)
        self._begun = time.monotonic()
        self._issued = 0
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Send until the requests or the minutes are over.

        Raises:
            SystemExit: the server's process is gone, or it is not idle afterwards.
        """
        print(f"{'row':>4} {'finished':>9} {'aborted':>8} {'failed':>7} {'gap ms':>8} {'resident MiB':>13}")
        model = json.loads((await self._client.fetch("GET", "/v1/models"))[1])["data"][0]["id"]
        clock = asyncio.create_task(self._tick()) if self._args.minutes else None
        await asyncio.gather(*(self._worker(model) for _ in range(self._args.streams)))
        if clock is not None:
            clock.cancel()
        self._close_row()
        await settled(self._client, self._args.settle_seconds)
        return self.outcome

    def _goes_on(self) -> bool:
        if len(self.outcome.failed) >= MAX_FAILED:
            return False
        if self._args.minutes:
            return time.monotonic() - self._begun < self._args.minutes * 60
        return bool(self._issued < self._args.requests)

    async def _worker(self, model: str) -> None:
        while self._goes_on():
            self._issued += 1
            await Stream(self._client, model, self._rng, self._args.aborts).run(self.outcome)
            is_row = self.outcome.done % max(self._args.requests // ROWS, 1) == 0
            if not self._args.minutes and is_row and self.outcome.done < self._args.requests:
                self._close_row()

    async def _tick(self) -> None:
        """A row a minute, or ten in a shorter run; the last one is that of the end."""
        pause = min(60.0, self._args.minutes * 60 / ROWS)
        while True:
            await asyncio.sleep(pause)
            if time.monotonic() - self._begun + pause / 2 < self._args.minutes * 60:
                self._close_row()

    def _close_row(self) -> None:
        self.outcome.close_row(resident(self._args.pid) if self._args.pid else 0)


async def soak(args: argparse.Namespace) -> Outcome:
    client = Client(args.url)
    try:
        return await Soak(args, client).run()
    finally:
        client.close()


async def metric(client: Client, name: str) -> float:
    text = (await client.fetch("GET", "/metrics"))[1].decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


async def settled(client: Client, timeout: float) -> None:
    """Wait until no request runs and no KV block is taken.

    Raises:
        SystemExit: that does not happen in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        running = await metric(client, "vllm:num_requests_running")
        usage = await metric(client, "vllm:kv_cache_usage_perc")
        if running == 0 and usage == 0:
            return
        if time.monotonic() > deadline:
            raise SystemExit(
                f"still running {running:g} requests, {usage:.2%} of the KV blocks taken, {timeout:g} s later"
            )
        await asyncio.sleep(0.05)


def memory_is_flat(rows: list[Row], growth: float) -> bool:
    """Whether the end holds hardly more than after a quarter of the requests."""
    early = next(row.memory for row in rows if row.done >= rows[-1].done // 4)
    late = rows[-1].memory
    print(
        f"resident memory: {early / 2**20:.1f} MiB at a quarter, {late / 2**20:.1f} at the end: {late / early - 1:+.1%}"
    )
    return late <= early * (1 + growth)


def pace_is_steady(rows: list[Row], drift: float) -> bool:
    """Whether the last quarter's events come about as soon one after the other as the second quarter's."""
    quarter = max(len(rows) // 4, 1)
    early = statistics.median(row.gap_ms for row in rows[quarter : 2 * quarter])
    late = statistics.median(row.gap_ms for row in rows[-quarter:])
    print(f"between events: {early:.2f} ms in the second quarter, {late:.2f} in the last: {late / early - 1:+.1%}")
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
    parser.add_argument(
        "--settle-seconds", type=float, default=10.0, help="Time to become idle after the last request."
    )
    args = parser.parse_args()
    begun = time.monotonic()
    with runner() as loop:
        outcome = loop.run(soak(args))
    seconds = time.monotonic() - begun
    print(f"{outcome.finished} finished, {outcome.aborted} aborted, {len(outcome.failed)} failed in {seconds:.1f} s")
    for reason in sorted(set(outcome.failed))[:5]:
        print("failed:", reason)
    ok = not outcome.failed
    if args.pid:
        ok &= memory_is_flat(outcome.rows, args.growth)
    if args.minutes and len(outcome.rows) >= 4:
        ok &= pace_is_steady(outcome.rows, args.drift)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
