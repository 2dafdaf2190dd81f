"""`vllm run-batch`: answer the requests of a file."""

import argparse
import contextlib

from vllm_clone.config import ENGINE_GROUPS, FrontendConfig, ObservabilityConfig, VllmConfig
from vllm_clone.engine.arg_utils import EngineArgs, refuse_what_cannot_act
from vllm_clone.entrypoints.cli.checks import check_frontend
from vllm_clone.entrypoints.cli.parser import FlagParser, UsageError
from vllm_clone.errors import ConfigError
from vllm_clone.utils.process import EarlySignals

USAGE = "vllm run-batch -i INPUT.jsonl -o OUTPUT.jsonl --model MODEL [options]"
FRONTEND_FIELDS = frozenset(
    {
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "enable_auto_tool_choice",
        "enable_log_outputs",
        "enable_per_request_metrics",
        "enable_prompt_tokens_details",
        "exclude_tools_when_tool_choice_none",
        "fingerprint_mode",
        "fingerprint_value",
        "log_config_file",
        "log_error_stack",
        "lora_modules",
        "max_log_len",
        "response_role",
        "return_tokens_as_token_ids",
        "tool_call_parser",
        "tool_parser_plugin",
        "tool_server",
        "tool_strict_level",
        "trust_request_chat_template",
    }
)
"""Flags of the server that mean something without HTTP."""


def add_arguments(parser: FlagParser) -> None:
    add = parser.add_argument
    add("-i", "--input-file", help="File of requests, one JSON object a line; - for standard input, or an http(s) URL.")
    add("-o", "--output-file", help="File for the answers; - for standard output, or an http(s) URL to PUT them to.")
    add("--resume", action="store_true", help="Keep what the output file has, and answer only what is missing.")
    add("--output-tmp-dir", help="Directory of the file that is sent to a URL; the system's when not given.")
    add("--enable-metrics", action="store_true", help="Serve Prometheus metrics while the batch runs.")
    add("--host", help="Address of the metrics; all interfaces when not given.")
    add("--port", type=int, default=8000, help="Port of the metrics.")
    add("--url", help="Older name of --host.")
    parser.add_config(FrontendConfig, FRONTEND_FIELDS)
    for group in (*ENGINE_GROUPS.values(), VllmConfig):
        parser.add_config(group)


def run(args: argparse.Namespace) -> int:
    """Answer every line; 0 however many of them failed.

    Raises:
        UsageError, ConfigError: the command line cannot be used.
        OSError: a file or URL cannot be.
        EngineDeadError: the engine cannot start.
    """
    for flag, value in (("-i/--input-file", args.input_file), ("-o/--output-file", args.output_file)):
        if not value:
            raise UsageError(f"{flag} is needed; {USAGE}")
    if args.output_file == args.input_file != "-":
        raise ConfigError(f"--output-file {args.output_file}: is the input; write to another file.")
    metrics_at = _metrics_address(args)
    given = vars(args)
    frontend = FrontendConfig(**{name: given[name] for name in FRONTEND_FIELDS if name in given})
    refuse_what_cannot_act(frontend)
    log_stats = not given.get("disable_log_stats", False)
    check_frontend(frontend, log_requests=given.get("enable_log_requests", False), log_stats=log_stats)
    config = EngineArgs.from_namespace(args).create_engine_config("server")
    _check_metrics(config.observability_config, enabled=args.enable_metrics)
    from vllm_clone.engine.engine_process import EngineProcess
    from vllm_clone.entrypoints.batch.lines import Input, Output
    from vllm_clone.entrypoints.launchers.run_batch import Batch, run_batch

    with contextlib.ExitStack() as closing, EarlySignals() as signals:
        source = closing.enter_context(contextlib.closing(Input(args.input_file)))
        output = Output(args.output_file, resume=args.resume, tmp_dir=args.output_tmp_dir)
        closing.callback(output.close)
        process = closing.enter_context(contextlib.closing(EngineProcess.start(config)))
        return run_batch(Batch(config, frontend, source, output, process, signals, metrics_at))


def _check_metrics(seen: ObservabilityConfig, *, enabled: bool) -> None:
    """What is measured must have somewhere to show."""
    if seen.cudagraph_metrics:
        raise ConfigError("--cudagraph-metrics: a batch writes no statistics line; leave it out.")
    if enabled and seen.disable_log_stats:
        raise ConfigError("--enable-metrics: shows statistics, which --disable-log-stats switches off; leave one out.")
    for name in ("kv_cache_metrics", "enable_mfu_metrics"):
        if getattr(seen, name) and not enabled:
            raise ConfigError(f"--{name.replace('_', '-')}: shows in metrics; give --enable-metrics too.")


def _metrics_address(args: argparse.Namespace) -> tuple[str, int] | None:
    if args.url is not None and args.host is not None:
        raise ConfigError("--url is the older name of --host; give one of them.")
    host = args.host or args.url
    if not args.enable_metrics:
        if host is not None or args.port != 8000:
            raise ConfigError("--host and --port say where metrics are; give --enable-metrics too, or leave them out.")
        return None
    return host or "0.0.0.0", args.port
