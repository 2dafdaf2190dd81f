"""`vllm bench latency`: how long one batch takes."""

import argparse

from vllm_clone.config import ENGINE_GROUPS, VllmConfig
from vllm_clone.engine.arg_utils import EngineArgs
from vllm_clone.entrypoints.cli.parser import FlagParser, UsageError

USAGE = "vllm bench latency --model MODEL [options]"


def add_arguments(parser: FlagParser) -> None:
    add = parser.add_argument
    add("--input-len", type=int, default=32, help="Tokens of a prompt.")
    add("--output-len", type=int, default=128, help="Tokens generated for it.")
    add("--batch-size", type=int, default=8, help="Prompts in the batch.")
    add("--n", type=int, default=1, help="Texts generated for each prompt.")
    add("--use-beam-search", action="store_true", help="Refused: there is no beam search yet.")
    add("--num-iters-warmup", type=int, default=10, help="Batches before measuring.")
    add("--num-iters", type=int, default=30, help="Batches measured.")
    add("--profile", action="store_true", help="Trace one batch and stop; needs --profiler-config.")
    add("--output-json", help="File for the figures.")
    add("--disable-detokenize", action="store_true", help="Make no text of the tokens.")
    for group in (*ENGINE_GROUPS.values(), VllmConfig):
        parser.add_config(group)


def run(args: argparse.Namespace) -> int:
    """Measure.

    Raises:
        UsageError, ConfigError: a flag cannot be used.
    """
    if args.use_beam_search:
        raise UsageError("--use-beam-search: beam search is not implemented yet; leave it out")
    for name, least in (("input_len", 1), ("output_len", 1), ("batch_size", 1), ("n", 1), ("num_iters", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    from vllm_clone.benchmarks.offline import latency

    options = latency.LatencyOptions(**{name: getattr(args, name) for name in latency.LatencyOptions.__slots__})
    latency.measure(EngineArgs.from_namespace(args).values, options)
    return 0
