"""Commands of vLLM that do not exist here yet: each says what it will do, and what does the work until then."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_clone.entrypoints.cli.parser import UsageError


class ToCome(NamedTuple):
    """A command, or a kind of one."""

    usage: str
    what: str
    instead: str


COMMANDS = {
    "launch": ToCome(
        "vllm launch render [options]",
        "A server that turns conversations into token ids, without an engine.",
        "/tokenize of vllm serve does that too",
    ),
    "snapshot": ToCome(
        "vllm snapshot create|inspect|restore [options]",
        "Keep a started engine in a file, and start from it.",
        "vllm serve is ready within seconds without one",
    ),
    "preload": ToCome(
        "vllm preload --model MODEL [options]",
        "Compile and download beforehand what a server needs.",
        "nothing is compiled at start here; the first vllm serve downloads the model",
    ),
    "download-kernels": ToCome(
        "vllm download-kernels [--dry-run]",
        "Fetch compiled GPU kernels.",
        "the package holds every CPU kernel",
    ),
}
"""By name."""

BENCH_KINDS = {
    "throughput": ToCome(
        "vllm bench throughput [options]",
        "Tokens per second of an engine without a server.",
        "vllm bench serve --request-rate inf",
    ),
    "sweep": ToCome(
        "vllm bench sweep serve|serve_workload|startup|plot|plot_pareto [options]",
        "Benchmarks over many settings, and their plots.",
        "one vllm bench serve --save-result for each setting",
    ),
    "mm-processor": ToCome(
        "vllm bench mm-processor [options]",
        "Seconds that images and sounds take to be prepared.",
        "there are no multimodal models here yet",
    ),
}
"""Kinds of `vllm bench`."""


def refuse(name: str, argv: Sequence[str], entry: ToCome) -> int:
    """Show the help when that is asked for; 0.

    Raises:
        UsageError: for anything else.
    """
    if any(arg in ("-h", "--help") or arg.startswith("--help=") for arg in argv):
        print(f"usage: {entry.usage}\n\n{entry.what} Not implemented yet; instead: {entry.instead}.")
        return 0
    raise UsageError(f"{name} is not implemented yet; instead: {entry.instead}")
