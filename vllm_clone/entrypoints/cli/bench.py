"""`vllm bench`: measure a running server."""

import argparse
from collections.abc import Sequence

from vllm_clone.benchmarks.serve.flags import all_flags
from vllm_clone.entrypoints.cli.parser import FlagParser, HelpShown, UsageError
from vllm_clone.entrypoints.cli.to_come import BENCH_KINDS, refuse

USAGE = "vllm bench serve|latency|startup [options]"


def prepare_argv(argv: Sequence[str]) -> list[str]:
    """Take the kind away; what is left are flags of `bench serve`.

    Raises:
        UsageError: no kind, or not one that works here.
    """
    if not argv or argv[0].startswith("-"):
        if any(arg in ("-h", "--help") or arg.startswith("--help=") for arg in argv):
            return list(argv)
        raise UsageError("bench: say what to measure: vllm bench serve [options]; vllm bench serve --help")
    kind, *rest = argv
    if kind in BENCH_KINDS:
        refuse(f"bench {kind}", rest, BENCH_KINDS[kind])
        raise HelpShown
    if kind != "serve":
        raise UsageError(f"bench: unknown kind {kind!r}; there are serve, latency and startup")
    return rest


def add_arguments(parser: FlagParser) -> None:
    for flag in all_flags():
        action = flag.add_to(parser)
        parser.groups.setdefault(flag.group, (GROUPS[flag.group], []))[1].append(action)


GROUPS = {
    "Target": "Which server, which model, which protocol.",
    "Request": "What every request asks for.",
    "Load": "How many requests leave, and when.",
    "Report": "What is printed and kept.",
    "Data": "Where prompts and lengths come from.",
}
"""Name of a group of flags → what they are about."""


def run(args: argparse.Namespace) -> int:
    """Run the benchmark: 0 even when requests failed, as scripts for vLLM's command expect.

    Raises:
        ConfigError: a flag, the data set or the tokenizer cannot be used.
        ServerError: the server does not answer.
    """
    from vllm_clone.benchmarks.serve import run as bench
    from vllm_clone.benchmarks.serve.options import options_of

    bench.main(options_of(args))
    return 0
