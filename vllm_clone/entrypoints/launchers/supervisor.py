"""Several API servers over one engine: starts them, passes signals on, and ends all when one of them ends."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec

from vllm_clone import envs
from vllm_clone.config import FrontendConfig, VllmConfig
from vllm_clone.engine.engine_process import TERM_SECONDS, launch, start_child
from vllm_clone.engine.shared_engine import Board, doors
from vllm_clone.entrypoints.launchers.api_server import log_start, run_loop
from vllm_clone.entrypoints.launchers.api_server_proc import Boot
from vllm_clone.logger import init_logger, set_process_name
from vllm_clone.utils.process import EarlySignals, describe_exit, wait_readable

logger = init_logger(__name__)

API_SERVER_MODULE = "vllm_clone.entrypoints.launchers.api_server_proc"
FAREWELL_SECONDS = 5.0
"""What API servers get to answer open requests once the engine is dead."""

Child = subprocess.Popen[bytes]


def run_servers(
    count: int,
    config: VllmConfig,
    frontend: FrontendConfig,
    listener: socket.socket,
    non_default: dict[str, Any],
    signals: EarlySignals,
) -> int:
    """Serve with ``count`` API servers that share a bound socket and an engine.

    Returns:
        The exit code: 0 after a signal, otherwise that of whoever ended first, at least 1.
    """
    set_process_name("Supervisor")
    log_start(config, non_default)
    if not config.observability_config.disable_log_stats:
        logger.info("With several API servers there is no periodic statistics line; /metrics has the totals.")
    with _metrics_directory(), contextlib.ExitStack() as ending:
        engine, servers = _start_all(count, config, frontend, listener)
        ending.callback(_end, [engine])
        ending.callback(_end, servers)
        return run_loop(_watch(engine, servers, signals))


def _start_all(
    count: int, config: VllmConfig, frontend: FrontendConfig, listener: socket.socket
) -> tuple[Child, list[Child]]:
    board = Board.memory(count)
    started: list[Child] = []
    try:
        with doors(count) as made:
            engine = launch(config, [door.input_file for door in made], [door.output_file for door in made])
            started.append(engine)
            for index, door in enumerate(made):
                boot = Boot(
                    config, frontend, index, count, engine.pid, os.getpid(), listener.fileno(), door.listening, board
                )
                fds = (listener.fileno(), *door.listening, board)
                started.append(start_child(API_SERVER_MODULE, msgspec.json.encode(boot), fds))
    except BaseException:
        _end(started)
        raise
    finally:
        os.close(board)
    return engine, started[1:]


async def _watch(engine: Child, servers: list[Child], signals: EarlySignals) -> int:
    """Return when every API server has ended: by a signal, because one of them ended, or because the engine did."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def pass_on() -> None:
        stopped.set()
        for server in servers:
            server.send_signal(signal.SIGTERM)  # nothing is sent to a process that has been waited for

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, pass_on)
    if signals.count:
        pass_on()
    with _exits([engine, *servers]) as (engine_exit, *server_exits):
        await asyncio.wait([engine_exit, *server_exits], return_when=asyncio.FIRST_COMPLETED)
        by_signal = stopped.is_set()
        if engine_exit.done():
            logger.error("The engine process %d ended unexpectedly (%s)", engine.pid, describe_exit(engine.wait()))
            await asyncio.wait(server_exits, timeout=FAREWELL_SECONDS)
            return 1
        if not by_signal:
            first = next(s for s, ended in zip(servers, server_exits, strict=True) if ended.done())
            logger.error("API server %d ended unexpectedly (%s)", first.pid, describe_exit(first.wait()))
            pass_on()
        all_ended = asyncio.ensure_future(_ended(server_exits))
        await asyncio.wait([engine_exit, all_ended], return_when=asyncio.FIRST_COMPLETED)
        if engine_exit.done():
            await asyncio.wait(server_exits, timeout=FAREWELL_SECONDS)
        codes = [server.poll() for server in servers]
    worst = max((1 if code is None or code < 0 else code) for code in codes)
    return worst if by_signal else max(worst, 1)


async def _ended(exits: "list[asyncio.Future[None]]") -> None:
    await asyncio.wait(exits)


@contextlib.contextmanager
def _exits(processes: list[Child]) -> Iterator[list["asyncio.Future[None]"]]:
    """A future per process, done when it has ended."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        futures = []
        for process in processes:
            fd = os.pidfd_open(process.pid)
            stack.callback(os.close, fd)
            future = loop.create_future()
            loop.add_reader(fd, _note_exit, loop, fd, future)
            stack.callback(loop.remove_reader, fd)
            futures.append(future)
        yield futures


def _note_exit(loop: asyncio.AbstractEventLoop, fd: int, future: "asyncio.Future[None]") -> None:
    loop.remove_reader(fd)
    if not future.done():
        future.set_result(None)


def _end(processes: list[Child]) -> None:
    """End what still runs: SIGTERM, then SIGKILL."""
    running = {os.pidfd_open(process.pid): process for process in processes if process.poll() is None}
    for stop in (Child.terminate, Child.kill):
        for process in running.values():
            stop(process)
        for fd in list(running):
            if wait_readable([fd], TERM_SECONDS):
                running.pop(fd).wait()
                os.close(fd)
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()


@contextlib.contextmanager
def _metrics_directory() -> Iterator[None]:
    """Where API servers share their series; a directory that the user has named is kept."""
    if envs.PROMETHEUS_MULTIPROC_DIR is not None:
        logger.warning("PROMETHEUS_MULTIPROC_DIR is set; the directory must be emptied between runs.")
        yield
        return
    directory = tempfile.mkdtemp(prefix="vllm-metrics-")
    try:
        envs.export("PROMETHEUS_MULTIPROC_DIR", directory)
        yield
    finally:
        envs.forget("PROMETHEUS_MULTIPROC_DIR")
        shutil.rmtree(directory, ignore_errors=True)
