"""Runs the HTTP server over an engine until a signal or the engine's death ends it."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Coroutine
from typing import Any

import uvicorn

from vllm_clone import envs
from vllm_clone.config import FrontendConfig, VllmConfig
from vllm_clone.engine.async_llm import AsyncLLM
from vllm_clone.engine.engine_process import EngineProcess
from vllm_clone.engine.shared_engine import AttachedEngine, Board
from vllm_clone.entrypoints.launchers.app import build_app, routes_of
from vllm_clone.entrypoints.launchers.http_protocol import limited_protocol
from vllm_clone.entrypoints.launchers.tls import follow_files, tls_options
from vllm_clone.errors import ConfigError, EngineDeadError
from vllm_clone.logger import init_logger
from vllm_clone.messages import EngineReady
from vllm_clone.metrics.log_line import StatLine
from vllm_clone.metrics.prometheus import make_metrics, new_registry, shared_registries
from vllm_clone.metrics.stats import StatLogger
from vllm_clone.utils.process import EarlySignals
from vllm_clone.version import VLLM_INTERFACE_VERSION, __version__

logger = init_logger(__name__)

CLOSE_SECONDS = 2.0
"""How long connections may stay open after the engine has answered everything."""

BANNER = r"""
       _ _               | {version}, interface of vLLM {interface}
__   _| | |_ __ ___      | model {model}
\ \ / / | | '_ ` _ \     |
 \ V /| | | | | | | |_   | clone of the server you know,
  \_/ |_|_|_| |_| |_(_)  | ready in seconds
"""


def run_server(
    config: VllmConfig,
    frontend: FrontendConfig,
    listener: socket.socket,
    process: EngineProcess | None,
    non_default: dict[str, Any],
    signals: EarlySignals,
) -> int:
    """Serve on a bound socket. ``process`` is the engine that is starting, None to run it in this process;
    ``signals`` knows of a signal that came before.

    Returns:
        The exit code: 0 after a signal, 1 after an engine's death.

    Raises:
        EngineDeadError: the engine cannot start; the message is cause and remedy.
    """
    log_start(config, non_default)
    return run_loop(_Server(config, frontend, listener, process).run(signals))


def log_start(config: VllmConfig, non_default: dict[str, Any]) -> None:
    """Banner, what was given, and what in the environment means nothing."""
    model = config.model_config.model
    if envs.VLLM_DISABLE_LOG_LOGO:
        logger.info("vllm_clone %s (interface of vLLM %s), model %s", __version__, VLLM_INTERFACE_VERSION, model)
    else:
        logger.info("%s", BANNER.format(version=__version__, interface=VLLM_INTERFACE_VERSION, model=model))
    logger.info("Non-default arguments: %s", non_default)
    for name in envs.unknown_names():
        logger.warning("The environment variable %s means nothing here; is it misspelt?", name)


def run_shared(
    config: VllmConfig, frontend: FrontendConfig, listener: socket.socket, engine: AttachedEngine, board: Board
) -> int:
    """:func:`run_server` for one of several API servers over one engine."""
    with EarlySignals() as signals:
        return run_loop(_Server(config, frontend, listener, engine, board).run(signals))


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine in the fastest event loop there is."""
    loop_factory: Any = None
    with contextlib.suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main)


class _Server:
    """The server's life: start, serve, drain, end."""

    def __init__(
        self,
        config: VllmConfig,
        frontend: FrontendConfig,
        listener: socket.socket,
        process: EngineProcess | None,
        board: Board | None = None,
    ) -> None:
        self._config = config
        self._frontend = frontend
        self._listener = listener
        self._process = process
        self._board = board
        self._is_first = not isinstance(process, AttachedEngine) or process.index == 0
        self._begun = time.monotonic()
        self._signals = 0
        self._stop = asyncio.Event()
        self._now = asyncio.Event()

    async def run(self, signals: EarlySignals) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self._on_signal)
        if signals.count:
            logger.info("Stopped by a signal while the engine was starting.")
            return 0
        config = self._config
        registry = shown = new_registry()
        if self._board is not None:
            registry, shown = shared_registries()
        loggers: list[StatLogger] = []
        metrics, line = None, StatLine(config.device_config.device)
        if not config.observability_config.disable_log_stats:
            metrics = make_metrics(config, registry)
            loggers = [metrics, line] if self._board is None else [metrics]
        engine = AsyncLLM.from_vllm_config(config, self._process, loggers, self._board)
        try:
            app = build_app(engine, config, self._frontend, registry, shown, self._board)
            ready = await self._wait_ready(engine)
            if ready is None:
                return 0
            if metrics is not None:
                metrics.record_ready(config.cache_config, ready, max_concurrency(ready))
            ticker = asyncio.create_task(_tick(line)) if line in loggers else None
            if self._is_first:
                self._announce(app, ready)
            code = await self._serve(engine, app)
            if ticker is not None:
                ticker.cancel()
            return code
        finally:
            await engine.shutdown()

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._now.set()

    async def _wait_ready(self, engine: AsyncLLM) -> EngineReady | None:
        """The engine's report, or None when a signal came first."""
        starting = asyncio.ensure_future(engine.wait_ready())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineDeadError):
            await starting
        logger.info("Stopped by a signal while the engine was starting.")
        return None

    def _announce(self, app: Any, ready: EngineReady) -> None:
        frontend = self._frontend
        host = (frontend.host or "0.0.0.0").removeprefix("[").removesuffix("]")
        host = f"[{host}]" if ":" in host else host
        scheme = "https" if frontend.ssl_certfile else "http"
        where = f"unix:{frontend.uds}" if frontend.uds else f"{scheme}://{host}:{frontend.port}"
        logger.info(
            "Engine ready: %.0f MiB of weights, KV cache of %d tokens (%.2fx the longest request)",
            ready.weight_bytes / 2**20,
            int(max_concurrency(ready) * ready.max_model_len),
            max_concurrency(ready),
        )
        logger.info("Starting vLLM server on %s", where)
        routes = [f"Route: {path}, Methods: {', '.join(methods)}" for path, methods in routes_of(app)]
        logger.info("Available routes are:\n%s", "\n".join(routes))

    async def _serve(self, engine: AsyncLLM, app: Any) -> int:
        frontend = self._frontend
        config = uvicorn.Config(
            app,
            http=limited_protocol(frontend.h11_max_incomplete_event_size, frontend.h11_max_header_count),
            log_config=None if envs.VLLM_LOGGING_CONFIG_PATH else uvicorn.config.LOGGING_CONFIG,
            log_level=frontend.uvicorn_log_level,
            access_log=not frontend.disable_uvicorn_access_log,
            lifespan="off",
            timeout_graceful_shutdown=None,
            **tls_options(frontend),
        )
        config.load()
        if frontend.disable_access_log_for_endpoints:
            logging.getLogger("uvicorn.access").addFilter(_Unlogged(frontend.disable_access_log_for_endpoints))
        server = _Uvicorn(config)
        refresher = None
        if frontend.enable_ssl_refresh and config.ssl is not None:
            refresher = asyncio.create_task(follow_files(config.ssl, frontend))
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        dead = asyncio.ensure_future(engine.wait_dead())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([serving, dead, stopped], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            dead.cancel()
            stopped.cancel()
            serving.result()
            raise ConfigError("the HTTP server ended by itself; its log is above.")
        if self._stop.is_set():
            await self._drain(engine)
            code = 0
        else:
            code = 1
            logger.error("The engine died: %s", dead.result())
            if envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
                await self._stop.wait()
        server.should_exit = True
        await asyncio.wait([serving], timeout=0 if self._now.is_set() else CLOSE_SECONDS)
        if not serving.done():
            server.force_exit = True
            await asyncio.wait([serving], timeout=CLOSE_SECONDS)
        for future in (dead, stopped, *([refresher] if refresher else [])):
            future.cancel()
        logger.info("Stopped after %.1f s.", time.monotonic() - self._begun)
        return code

    async def _drain(self, engine: AsyncLLM) -> None:
        """Let open requests finish or abort them with an answer; a second signal aborts them now."""
        timeout = float(self._frontend.shutdown_timeout)
        what = f"open requests have {timeout:g} s to finish" if timeout else "open requests are aborted"
        logger.info("Shutting down: %s.", what)
        engine.stop_accepting()
        ending = asyncio.ensure_future(engine.shutdown(timeout))
        hurry = asyncio.ensure_future(self._now.wait())
        await asyncio.wait([ending, hurry], return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await engine.shutdown(0)
        await ending
        hurry.cancel()


class _Unlogged(logging.Filter):
    """Drops access log lines of some paths; a comma-separated list."""

    def __init__(self, paths: str) -> None:
        super().__init__()
        self._paths = {path.strip() for path in paths.split(",")}

    def filter(self, record: logging.LogRecord) -> bool:
        """uvicorn logs (client, method, path with query, version, status)."""
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in self._paths)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: the server's life is decided in one place."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


async def _tick(line: StatLine) -> None:
    while True:
        await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
        line.log()


def max_concurrency(ready: EngineReady) -> float:
    """How many requests of full length the KV cache holds."""
    blocks_per_request = -(-ready.max_model_len // ready.block_size)
    return (ready.num_blocks - 1) / blocks_per_request
