"""`vllm serve`: claim the port, start the engine, serve. Whatever takes time happens side by side."""

import argparse
import contextlib
import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_clone.config import ENGINE_GROUPS, FrontendConfig, ModelConfig, ServeConfig, VllmConfig
from vllm_clone.config.flags import flags_of
from vllm_clone.engine.arg_utils import EngineArgs, refuse_what_cannot_act
from vllm_clone.entrypoints.cli.checks import check_frontend, check_serve
from vllm_clone.entrypoints.cli.parser import FlagParser
from vllm_clone.errors import ConfigError
from vllm_clone.utils.process import EarlySignals

if TYPE_CHECKING:
    from vllm_clone.engine.engine_process import EngineProcess

USAGE = "vllm serve [model_tag] [options]"
GROUPS = (ServeConfig, FrontendConfig, *ENGINE_GROUPS.values(), VllmConfig)
BACKLOG = 2048


def add_arguments(parser: FlagParser) -> None:
    parser.add_argument("model_tag", nargs="?", help="Model: a hub id, a local directory, or a .gguf file.")
    for group in GROUPS:
        parser.add_config(group)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal or an engine's death; the exit code."""
    args.model = _model_of(args)
    given = vars(args)
    serve = ServeConfig(**{k: v for k, v in given.items() if k in ServeConfig.__dataclass_fields__})
    frontend = FrontendConfig(**{k: v for k, v in given.items() if k in FrontendConfig.__dataclass_fields__})
    if not serve.disable_log_requests:
        given.setdefault("enable_log_requests", True)
    refuse_what_cannot_act(serve)
    refuse_what_cannot_act(frontend)
    check_serve(serve, frontend, step_line=given.get("cudagraph_metrics", False))
    check_frontend(
        frontend,
        log_requests=given.get("enable_log_requests", False),
        log_stats=not given.get("disable_log_stats", False),
    )
    engine_args = EngineArgs.from_namespace(args)
    config = engine_args.create_engine_config("server")
    if serve.dry_run:
        from vllm_clone.entrypoints.cli import dry_run

        print(dry_run.report(engine_args, config, frontend, getattr(args, "sources", {})))
        return 0
    with claimed_address(frontend) as listener, EarlySignals() as signals:
        if (count := serve.api_server_count or 1) > 1:
            from vllm_clone.entrypoints.launchers.supervisor import run_servers

            return run_servers(count, config, frontend, listener, _non_default(engine_args, frontend), signals)
        if frontend.disable_frontend_multiprocessing:
            return _serve(config, frontend, listener, None, engine_args, signals)
        from vllm_clone.engine.engine_process import EngineProcess

        process = EngineProcess.start(config)
        try:
            return _serve(config, frontend, listener, process, engine_args, signals)
        finally:
            process.close()


def _model_of(args: argparse.Namespace) -> str:
    """The model: as typed by itself, else ``--model``, which a config file may also give, else the default one."""
    flag, in_file = getattr(args, "model", None), getattr(args, "config", None) is not None
    if args.model_tag is not None:
        if flag not in (None, args.model_tag) and not in_file:
            print(f"vllm: warning: {args.model_tag} is served, not --model {flag}.", file=sys.stderr)
        return str(args.model_tag)
    if flag is None and ("served_model_name" in args or in_file):
        hint = "--served-model-name takes every word after it" if "served_model_name" in args else "the file has none"
        raise ConfigError(f"no model given; write vllm serve MODEL before the flags ({hint}).")
    return str(flag or ModelConfig().model)


def _serve(
    config: VllmConfig,
    frontend: FrontendConfig,
    listener: socket.socket,
    process: "EngineProcess | None",
    engine_args: EngineArgs,
    signals: EarlySignals,
) -> int:
    from vllm_clone.entrypoints.launchers.api_server import run_server

    return run_server(config, frontend, listener, process, _non_default(engine_args, frontend), signals)


def _non_default(engine_args: EngineArgs, frontend: FrontendConfig) -> dict[str, Any]:
    """What the log tells of the command line."""
    return engine_args.values | {
        spec.field: "***" if spec.secret else value
        for spec in flags_of(FrontendConfig)
        if (value := getattr(frontend, spec.field)) != spec.default
    }


@contextlib.contextmanager
def claimed_address(frontend: FrontendConfig) -> Iterator[socket.socket]:
    """A socket that owns the server's address before anything slow happens, closed at the end.

    It listens already, so that two servers cannot both believe the port is theirs; clients that come early wait.

    Raises:
        OSError: the address is taken or not ours; the message names it and a remedy.
    """
    listener = _listen_unix(frontend.uds) if frontend.uds is not None else _listen_tcp(frontend.host, frontend.port)
    listener.setblocking(False)
    try:
        yield listener
    finally:
        listener.close()
        if frontend.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(frontend.uds)


def _listen_tcp(host: str | None, port: int) -> socket.socket:
    host = (host or "0.0.0.0").removeprefix("[").removesuffix("]")
    where = f"--port {port}" if host == "0.0.0.0" else f"--host {host} --port {port}"
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"{where}: {error.strerror}; {_remedy(error)}.") from error
    return listener


def _remedy(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "give an address of this machine, or no --host for all of them"
    if error.errno == errno.EACCES:
        return "choose a port above 1023"
    return "stop the other server or choose another port"


def _listen_unix(path: str) -> socket.socket:
    where = f"--uds {path}"
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(f"{where}: exists and is no socket; choose another path.")
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            if probe.connect_ex(path) == errno.ECONNREFUSED:
                os.unlink(path)  # left behind by a server that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        remedy = "stop the other server or choose another path" if taken else "choose a path that can be written"
        raise OSError(f"{where}: {error.strerror or error}; {remedy}.") from error
    return listener
