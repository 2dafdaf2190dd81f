#!/usr/bin/env python3
"""Several OpenAI-compatible servers under one client, in turn: start-up, memory, speed, and ratios to the first.

    compare.py --server 'ours=vllm serve MODEL --port {port} --served-model-name m' \\
               --server 'peer=llama-server -m MODEL.gguf --port {port}' \\
               [--workload single --workload batch …] [--rounds 3] [--json FILE]

Each server is started once and left idle while the others are measured; a round measures every server on every
workload, and every other round goes through the servers backwards, so that a slow minute of the machine and the order
hit all alike. Ratios above 1 are in favour of the first server. Workloads: single, batch, long, prefix, toy1, toy64,
toy256 (toy*: for a toy model), or NAME:CONCURRENCY,REQUESTS,INPUT,OUTPUT[,PREFIX]. Prompts are token ids, so that
every server computes the same; the client is that of `vllm bench serve`.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from servers import Server, start

from vllm_clone.benchmarks.serve.arrivals import Arrivals
from vllm_clone.benchmarks.serve.backends import BACKENDS
from vllm_clone.benchmarks.serve.client import Sender
from vllm_clone.benchmarks.serve.http import Client
from vllm_clone.benchmarks.serve.load import Driver
from vllm_clone.benchmarks.serve.sample import Outcome, Sample

BUSY_CLIENT = 0.5
"""Share of a core above which the client takes too much of a small machine."""


@dataclass(frozen=True)
class Workload:
    """``requests`` of ``input_len`` tokens behind a shared ``prefix_len``, so many at a time."""

    concurrency: int
    requests: int
    input_len: int
    output_len: int
    prefix_len: int = 0


WORKLOADS = {
    "single": Workload(1, 3, 256, 128),
    "batch": Workload(16, 48, 256, 128),
    "long": Workload(4, 8, 2048, 16),
    "prefix": Workload(8, 32, 64, 64, 1536),
    "toy1": Workload(1, 20, 32, 64),
    "toy64": Workload(64, 512, 32, 64),
    "toy256": Workload(256, 1024, 32, 64),
}
WARM_UP = Workload(1, 1, 16, 4)


@dataclass(frozen=True)
class Figures:
    """Of one run. Milliseconds and tokens per second."""

    ttft_ms: float
    tpot_ms: float
    output_per_s: float
    total_per_s: float
    failed: int
    client_share: float


def samples_of(w: Workload, seed: int, ids: tuple[int, int]) -> list[Sample]:
    rng = random.Random(seed)
    draw = lambda count: [rng.randrange(*ids) for _ in range(count)]  # noqa: E731
    prefix = draw(w.prefix_len)
    size = w.prefix_len + w.input_len
    return [Sample(prefix + draw(w.input_len), size, w.output_len) for _ in range(w.requests)]


def measure(url: str, model: str, w: Workload, seed: int, ids: tuple[int, int]) -> Figures:
    """Send a workload to a server."""

    async def run() -> Figures:
        client = Client(url)
        extra = {"temperature": 0.0, "ignore_eos": True}
        sender = Sender(client, BACKENDS["openai"], "/v1/completions", extra_body=extra)
        samples = samples_of(w, seed, ids)
        try:
            driver = Driver(sender, model, w.concurrency, bar=False)
            load = await driver.run(samples, Arrivals([0.0] * len(samples), []))
        finally:
            client.close()
        return figures_of(load.outcomes, load.duration, load.client_share)

    return asyncio.run(run())


def figures_of(outcomes: list[Outcome], seconds: float, client_share: float) -> Figures:
    done = [o for o in outcomes if o.success]
    for error in sorted({o.error for o in outcomes if not o.success})[:3]:
        print(f"failed: {error}", file=sys.stderr)
    output = sum(o.output_len for o in done)
    nothing = float("nan")
    return Figures(
        statistics.median(o.ttft * 1e3 for o in done) if done else nothing,
        statistics.median([o.tpot * 1e3 for o in done if o.output_len > 1] or [nothing]),
        output / seconds,
        (output + sum(o.prompt_len for o in done)) / seconds,
        len(outcomes) - len(done),
        client_share,
    )


def workload_of(text: str) -> tuple[str, Workload]:
    name, _, numbers = text.partition(":")
    try:
        return name, Workload(*map(int, numbers.split(","))) if numbers else WORKLOADS[name]
    except (KeyError, ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text}: not one of {', '.join(WORKLOADS)}, nor NAME:C,N,IN,OUT") from None


def run_rounds(servers: list[Server], args: argparse.Namespace) -> dict[str, dict[str, list[Figures]]]:
    """Figures of each round by server and workload."""
    found: dict[str, dict[str, list[Figures]]] = {s.name: {name: [] for name, _ in args.workload} for s in servers}
    ids = (args.id_low, args.id_high)
    for number in range(args.rounds):
        for name, workload in args.workload:
            for server in servers if number % 2 == 0 else servers[::-1]:
                figures = measure(server.url, args.model, workload, args.seed + number, ids)
                found[server.name][name].append(figures)
                if figures.client_share > BUSY_CLIENT:
                    print(
                        f"{server.name} {name}: the client took {figures.client_share:.0%} of a core", file=sys.stderr
                    )
    return found


def median_of(runs: list[Figures], name: str) -> float:
    return statistics.median(getattr(r, name) for r in runs)


def table(servers: list[Server], found: dict[str, dict[str, list[Figures]]], memory: dict[str, int]) -> str:
    """The figures, and how often the first server is better than each other one."""
    first = servers[0].name
    lines = [f"{s.name}: ready in {s.start_seconds:.2f} s, {memory[s.name] / 2**20:.0f} MiB" for s in servers]
    lines.append(f"{'workload':10} {'server':12} {'TTFT ms':>10} {'TPOT ms':>9} {'out tok/s':>10} {'all tok/s':>10}")
    for workload in found[first]:
        for server in servers:
            row = {k: median_of(found[server.name][workload], k) for k in ("ttft_ms", "tpot_ms", "output_per_s")}
            total = median_of(found[server.name][workload], "total_per_s")
            best = {k: median_of(found[first][workload], k) for k in row}
            ratio = "" if server.name == first else (
                f"   {first} is ×{row['ttft_ms'] / best['ttft_ms']:.2f} TTFT, ×{row['tpot_ms'] / best['tpot_ms']:.2f} TPOT, "
                f"×{best['output_per_s'] / row['output_per_s']:.2f} tok/s"
            )  # fmt: skip
            lines.append(
                f"{workload:10} {server.name:12} {row['ttft_ms']:10.1f} {row['tpot_ms']:9.2f} "
                f"{row['output_per_s']:10.1f} {total:10.1f}{ratio}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--workload", action="append", type=workload_of, metavar="NAME[:C,N,IN,OUT[,PREFIX]]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="m", help="Name to ask for, which every server must serve.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--id-low", type=int, default=1000, help="Smallest token id of a prompt.")
    parser.add_argument("--id-high", type=int, default=40000, help="Token ids of prompts are below this.")
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="Directory of the servers' logs.")
    parser.add_argument("--json", type=Path, help="Keep every figure of every round here.")
    args = parser.parse_args()
    args.workload = args.workload or [(name, WORKLOADS[name]) for name in ("single", "batch", "long")]
    servers: list[Server] = []
    try:
        for text in args.server:
            name, _, command = text.partition("=")
            servers.append(start(name, command, args.logs / f"compare-{name}.log", args.start_timeout))
            measure(servers[-1].url, args.model, WARM_UP, args.seed, (args.id_low, args.id_high))
        begun = time.monotonic()
        found = run_rounds(servers, args)
        memory = {s.name: s.memory_bytes() for s in servers}
    finally:
        for server in servers:
            server.stop()
    print(table(servers, found, memory))
    print(f"medians of {args.rounds} rounds, {time.monotonic() - begun:.0f} s")
    if args.json:
        whole = {
            s.name: {
                "start_seconds": s.start_seconds,
                "memory_bytes": memory[s.name],
                "runs": {name: [asdict(f) for f in runs] for name, runs in found[s.name].items()},
            }
            for s in servers
        }
        args.json.write_text(json.dumps(whole, indent=1) + "\n")
    return int(any(f.failed for by_name in found.values() for runs in by_name.values() for f in runs))


if __name__ == "__main__":
    sys.exit(main())
