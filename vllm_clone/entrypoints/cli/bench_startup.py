"""`vllm bench startup`: how long an engine takes to be ready."""

import argparse

from vllm_clone.config import ENGINE_GROUPS, VllmConfig
from vllm_clone.engine.arg_utils import EngineArgs
from vllm_clone.entrypoints.cli.parser import FlagParser, UsageError

USAGE = "vllm bench startup --model MODEL [options]"


def add_arguments(parser: FlagParser) -> None:
    add = parser.add_argument
    add("--num-iters-cold", type=int, default=3, help="Starts that read the model's files from the disk.")
    add("--num-iters-warmup", type=int, default=1, help="Starts before the warm ones, not measured.")
    add("--num-iters-warm", type=int, default=3, help="Starts with the files in the system's cache.")
    add("--output-json", help="File for the figures.")
    for group in (*ENGINE_GROUPS.values(), VllmConfig):
        parser.add_config(group)


def run(args: argparse.Namespace) -> int:
    """Measure.

    Raises:
        UsageError, ConfigError: a flag cannot be used.
        EngineDeadError: a start failed.
    """
    from vllm_clone.benchmarks.offline import startup

    options = startup.StartupOptions(**{name: getattr(args, name) for name in startup.StartupOptions.__slots__})
    if min(options.num_iters_cold, options.num_iters_warmup, options.num_iters_warm) < 0:
        raise UsageError("--num-iters-cold, --num-iters-warmup and --num-iters-warm must be at least 0")
    startup.measure(EngineArgs.from_namespace(args).values, options)
    return 0
