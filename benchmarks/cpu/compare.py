#!/usr/bin/env python3
"""Several OpenAI-compatible servers under one client, in turn: start-up, memory, speed, and ratios to the first.

    compare.py --model DIR [--gguf FILE] --ours vllm [--vllm PATH] [--llama-server PATH]
               [--server 'NAME=COMMAND --port {port} …'] [--workload single …] [--rounds 3] [--json FILE]

--ours, --vllm and --llama-server are programs; this project's and vLLM's get DIR, llama.cpp's gets FILE, and all of
them the same room for contexts and every core that may be used. --server adds any other command, which must serve the
name that --served-model-name says. The first server is the one that ratios are about: above 1 is in its favour.

Each server is started once and left idle while the others are measured; a round measures every server on every
workload, and every other round goes through the servers backwards, so that a slow minute of the machine and the order
hit all alike. Figures are medians of rounds. Prompts are token ids, so that every server computes the same; the client
is that of `vllm bench serve`, and a note says when it took much of a core.

Workloads: single, batch, long, prefix; toy for toy models; or NAME:CONCURRENCY,REQUESTS,INPUT,OUTPUT[,PREFIX].
Exits 1 when a request failed.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from servers import COMMANDS, Room, Server, start

from vllm_clone.benchmarks.serve.arrivals import Arrivals
from vllm_clone.benchmarks.serve.backends import BACKENDS
from vllm_clone.benchmarks.serve.client import Sender
from vllm_clone.benchmarks.serve.http import Client
from vllm_clone.benchmarks.serve.load import Driver
from vllm_clone.benchmarks.serve.run import runner
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

    @property
    def length(self) -> int:
        """Tokens of a request, prompt and output."""
        return self.prefix_len + self.input_len + self.output_len


WORKLOADS = {
    "single": {"single": Workload(1, 3, 256, 128)},
    "batch": {"batch": Workload(16, 48, 256, 128)},
    "long": {"long": Workload(4, 8, 2048, 16)},
    "prefix": {"prefix": Workload(8, 32, 64, 64, 1536)},
    "toy": {
        "toy1": Workload(1, 20, 32, 64),
        "toy64": Workload(64, 512, 32, 64),
        "toy256": Workload(256, 1024, 32, 64),
    },
}
"""Name → workloads that it stands for, by their own names."""
DEFAULT = ("single", "batch", "long", "prefix")
WARM_UP = Workload(1, 1, 16, 4)
WARM_UP_SEED = 999_999


@dataclass(frozen=True)
class Figures:
    """Of one run, or medians of several. Milliseconds and tokens per second, NaN without a successful request."""

    ttft_ms: float
    tpot_ms: float
    output_per_s: float
    total_per_s: float
    failed: int
    client_share: float

    def better_than(self, other: "Figures") -> dict[str, float]:
        """How many times better: name → ratio."""
        return {
            "TTFT": _ratio(other.ttft_ms, self.ttft_ms),
            "TPOT": _ratio(other.tpot_ms, self.tpot_ms),
            "tok/s": _ratio(self.output_per_s, other.output_per_s),
        }


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


def samples_of(w: Workload, seed: int, ids: tuple[int, int]) -> list[Sample]:
    """Samples of random token ids from ``ids[0]`` to below ``ids[1]``."""
    rng = random.Random(seed)
    prefix = [rng.randrange(*ids) for _ in range(w.prefix_len)]
    prompts = ([*prefix, *(rng.randrange(*ids) for _ in range(w.input_len))] for _ in range(w.requests))
    return [Sample(prompt, len(prompt), w.output_len) for prompt in prompts]


def measure(url: str, model: str, w: Workload, seed: int, ids: tuple[int, int]) -> Figures:
    """Send a workload to a server."""

    async def run() -> Figures:
        client = Client(url)
        extra = {"temperature": 0.0, "ignore_eos": True}
        sender = Sender(client, BACKENDS["openai"], "/v1/completions", extra_body=extra)
        samples = samples_of(w, seed, ids)
        try:
            load = await Driver(sender, model, w.concurrency, bar=False).run(samples, Arrivals([0.0] * w.requests, []))
        finally:
            client.close()
        return figures_of(load.outcomes, load.duration, load.client_share)

    with runner() as loop:
        return loop.run(run())


def figures_of(outcomes: list[Outcome], seconds: float, client_share: float) -> Figures:
    """Figures of one run; why requests failed goes to stderr."""
    done = [o for o in outcomes if o.success]
    for error in sorted({o.error for o in outcomes if not o.success})[:3]:
        print(f"failed: {error}", file=sys.stderr)
    output = sum(o.output_len for o in done)
    return Figures(
        statistics.median([o.ttft * 1e3 for o in done] or [float("nan")]),
        statistics.median([o.tpot * 1e3 for o in done if o.output_len > 1] or [float("nan")]),
        output / seconds,
        (output + sum(o.prompt_len for o in done)) / seconds,
        len(outcomes) - len(done),
        client_share,
    )


def median(runs: list[Figures]) -> Figures:
    names = ("ttft_ms", "tpot_ms", "output_per_s", "total_per_s", "client_share")
    middle = {name: statistics.median(getattr(r, name) for r in runs) for name in names}
    return Figures(**middle, failed=sum(r.failed for r in runs))


def workloads_of(text: str) -> dict[str, Workload]:
    """Workloads by name, of a known name or of a name and numbers."""
    name, _, numbers = text.partition(":")
    try:
        return {name: Workload(*map(int, numbers.split(",")))} if numbers else WORKLOADS[name]
    except (KeyError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(WORKLOADS)}, or NAME:C,N,IN,OUT[,PREFIX]") from (
            error
        )


Runs = dict[str, dict[str, list[Figures]]]
"""Workload → server → figures of each round."""


def run_rounds(servers: list[Server], workloads: dict[str, Workload], args: argparse.Namespace) -> Runs:
    found: Runs = {name: {s.name: [] for s in servers} for name in workloads}
    for number in range(args.rounds):
        for name, workload in workloads.items():
            for server in servers if number % 2 == 0 else servers[::-1]:
                seed = args.seed + number
                figures = measure(server.url, args.served_model_name, workload, seed, (args.id_low, args.id_high))
                found[name][server.name].append(figures)
                note = f" (client: {figures.client_share:.0%} of a core)" if figures.client_share > BUSY_CLIENT else ""
                print(
                    f"round {number + 1} {name} {server.name}: {figures.output_per_s:.1f} tok/s{note}", file=sys.stderr
                )
    return found


def report(servers: list[Server], found: Runs, memory: dict[str, int]) -> str:
    """Start-up, memory and figures as Markdown tables, the ratios in the columns that start with ×."""
    lines = ["| server | ready in s | memory MiB |", "|---|--:|--:|"]
    lines += [f"| {s.name} | {s.start_seconds:.2f} | {memory[s.name] / 2**20:.0f} |" for s in servers]
    first = servers[0].name
    lines += ["", f"× is how many times {first} is better: the median of the ratios of each round.", ""]
    lines.append("| workload | server | TTFT ms | TPOT ms | out tok/s | all tok/s | × TTFT | × TPOT | × tok/s |")
    lines.append("|---|---|" + "--:|" * 7)
    for workload, by_server in found.items():
        for server in servers:
            row, ratios = median(by_server[server.name]), [""] * 3
            if server.name != first:
                rounds = zip(by_server[first], by_server[server.name], strict=True)
                better = [ours.better_than(theirs) for ours, theirs in rounds]
                ratios = [f"{statistics.median(each[key] for each in better):.2f}" for key in better[0]]
            lines.append(
                f"| {workload} | {server.name} | {row.ttft_ms:.1f} | {row.tpot_ms:.2f} | {row.output_per_s:.1f} | "
                f"{row.total_per_s:.1f} | {' | '.join(ratios)} |"
            )
    return "\n".join(lines)


def commands_of(args: argparse.Namespace, room: Room, parser: argparse.ArgumentParser) -> dict[str, str]:
    """Server → command, in the order in which they are measured."""
    commands = {}
    for name, template in COMMANDS.items():
        program = getattr(args, name.replace(".", "_"))
        model = args.gguf if name == "llama.cpp" else args.model
        if program is not None:
            if model is None:
                parser.error(f"{name} needs {'--gguf' if name == 'llama.cpp' else '--model'}")
            commands[name] = template(program, model, args.served_model_name, room)
    for text in args.server:
        name, separator, command = text.partition("=")
        if not separator or name in commands:
            parser.error(f"--server {text}: must be NAME=COMMAND, with a name of its own")
        commands[name] = command
    if not commands:
        parser.error("nothing to measure: give --ours, --vllm, --llama-server or --server")
    return commands


def parsed() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", metavar="PATH", help="The program vllm of this project.")
    parser.add_argument("--vllm", metavar="PATH", help="The program vllm of vLLM's CPU build.")
    parser.add_argument("--llama-server", metavar="PATH", dest="llama_cpp", help="The server program of llama.cpp.")
    parser.add_argument("--model", metavar="DIR", help="Model of --ours and --vllm.")
    parser.add_argument("--gguf", metavar="FILE", help="Model of --llama-server.")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--workload", action="append", type=workloads_of, metavar="NAME[:C,N,IN,OUT[,PREFIX]]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--served-model-name", default="m", help="Name to ask for.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--id-low", type=int, default=1000, help="Smallest token id of a prompt.")
    parser.add_argument("--id-high", type=int, default=40000, help="Token ids of prompts are below this.")
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="Directory of servers' logs.")
    parser.add_argument("--json", type=Path, help="Keep every figure of every round here.")
    return parser.parse_args(), parser


def main() -> int:
    args, parser = parsed()
    chosen = args.workload or [WORKLOADS[name] for name in DEFAULT]
    workloads = {name: w for group in chosen for name, w in group.items()}
    room = Room(max(w.length for w in workloads.values()), max(w.concurrency for w in workloads.values()))
    commands = commands_of(args, room, parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the servers are stopped
    servers: list[Server] = []
    begun = time.monotonic()
    try:
        for name, command in commands.items():
            servers.append(start(name, command, args.logs / f"compare-{name}.log", args.start_timeout))
            ids = (args.id_low, args.id_high)
            if measure(servers[-1].url, args.served_model_name, WARM_UP, WARM_UP_SEED, ids).failed:
                raise SystemExit(f"{name} does not answer; its log is {args.logs / f'compare-{name}.log'}")
        found = run_rounds(servers, workloads, args)
        memory = {s.name: s.memory_bytes() for s in servers}
    finally:
        for server in servers:
            server.stop()
    print(report(servers, found, memory))
    print(f"\nMedians of {args.rounds} rounds, {time.monotonic() - begun:.0f} s in all.")
    if args.json:
        whole = {
            "commands": commands,
            "start_seconds": {s.name: s.start_seconds for s in servers},
            "memory_bytes": memory,
            "workloads": {name: asdict(w) for name, w in workloads.items()},
            "runs": {w: {s: [asdict(f) for f in runs] for s, runs in by.items()} for w, by in found.items()},
        }
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return int(any(f.failed for by_server in found.values() for runs in by_server.values() for f in runs))


if __name__ == "__main__":
    sys.exit(main())
