"""`vllm serve`: claim the port, start the engine, serve. Whatever takes time happens side by side."""

import argparse
import contextlib
import os
import socket
from collections.abc import Sequence

from vllm_clone.config import ENGINE_GROUPS, FrontendConfig
from vllm_clone.config.flags import flags_of
from vllm_clone.engine.arg_utils import EngineArgs
from vllm_clone.errors import ConfigError
from vllm_clone.utils.flag_parser import FlagParser, expand_config_file

USAGE = "vllm serve [model_tag] [options]"
GROUPS = (FrontendConfig, *ENGINE_GROUPS.values())
BACKLOG = 2048


def add_arguments(parser: FlagParser) -> None:
    parser.add_argument("model_tag", nargs="?", help="Model: a hub id, a local directory, or a .gguf file.")
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags; typed flags win over it.")
    for group in GROUPS:
        parser.add_config(group)


def prepare_argv(argv: Sequence[str]) -> list[str]:
    """Bring in the flags of ``--config``."""
    one_way = frozenset(spec.name for group in GROUPS for spec in flags_of(group) if spec.one_way)
    return expand_config_file(argv, one_way)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal or an engine's death; the exit code."""
    if args.model_tag is not None:
        args.model = args.model_tag
    if not hasattr(args, "model"):
        raise ConfigError("no model given; write vllm serve MODEL.")
    frontend = FrontendConfig(**{k: v for k, v in vars(args).items() if k in FrontendConfig.__dataclass_fields__})
    _check_frontend(frontend)
    engine_args = EngineArgs.from_namespace(args)
    config = engine_args.create_engine_config("server")
    with contextlib.closing(claim_address(frontend)) as listener:
        if frontend.disable_frontend_multiprocessing:
            return _serve(config, frontend, listener, None, engine_args)
        from vllm_clone.engine.engine_process import EngineProcess

        process = EngineProcess.start(config)
        try:
            return _serve(config, frontend, listener, process, engine_args)
        finally:
            process.close()


def _serve(config, frontend, listener, process, engine_args) -> int:  # type: ignore[no-untyped-def]
    from vllm_clone.entrypoints.launchers.api_server import run_server

    non_default = engine_args.values | {
        spec.field: "***" if spec.secret else value
        for spec in flags_of(FrontendConfig)
        if (value := getattr(frontend, spec.field)) != spec.default
    }
    return run_server(config, frontend, listener, process, non_default)


def _check_frontend(frontend: FrontendConfig) -> None:
    if not 0 < frontend.port < 65536:
        raise ConfigError(f"--port {frontend.port}: must be between 1 and 65535.")
    for name in ("shutdown_timeout", "sse_keep_alive_interval"):
        if getattr(frontend, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(frontend, name)}: must be at least 0.")
    if frontend.max_log_len is not None and frontend.max_log_len < 0:
        raise ConfigError(f"--max-log-len {frontend.max_log_len}: must be at least 0.")


def claim_address(frontend: FrontendConfig) -> socket.socket:
    """Bind the address before anything slow happens. It listens only once the server is up.

    Raises:
        OSError: the address is taken or not ours; the message names it and a remedy.
    """
    if frontend.uds is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address, where = frontend.uds, f"--uds {frontend.uds}"
        with contextlib.suppress(OSError):
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.closing(probe):
                if probe.connect_ex(address) != 0:
                    os.unlink(address)  # left behind by a server that was killed
    else:
        family = socket.AF_INET6 if ":" in (frontend.host or "") else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address, where = (frontend.host or "0.0.0.0", frontend.port), f"--port {frontend.port}"  # type: ignore[assignment]
    try:
        listener.bind(address)
        # Two sockets may both be bound with SO_REUSEADDR while neither listens; listening settles whose it is.
        if frontend.uds is None:
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"{where}: {error.strerror}; stop the other server or choose another address.") from error
    listener.setblocking(False)
    return listener
