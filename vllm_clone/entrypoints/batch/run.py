"""Runs a batch over an engine: reads ahead a little, keeps the engine full, writes results as they come."""

import asyncio
import concurrent.futures
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp
from tqdm import tqdm

from vllm_clone.config import FrontendConfig, VllmConfig
from vllm_clone.engine.async_llm import AsyncLLM
from vllm_clone.engine.engine_process import EngineProcess
from vllm_clone.entrypoints.batch.files import MAX_LINE_BYTES, ResultFile, lines_of
from vllm_clone.entrypoints.batch.requests import Outcome, run_line
from vllm_clone.entrypoints.launchers.api_server import max_concurrency
from vllm_clone.entrypoints.launchers.app import build_app
from vllm_clone.errors import EngineDeadError
from vllm_clone.logger import init_logger
from vllm_clone.metrics.prometheus import PrometheusMetrics
from vllm_clone.metrics.stats import StatLogger

logger = init_logger(__name__)

READ_AHEAD = 32
"""Lines read before there is room for them."""


class _Reader(threading.Thread):
    """Hands lines to the event loop; a thread, since reading blocks, and a daemon, since it may block for ever."""

    def __init__(self, source: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="batch-reader", daemon=True)
        self.lines: asyncio.Queue[tuple[int, bytes] | BaseException | None] = asyncio.Queue(READ_AHEAD)
        self._source, self._loop = source, loop

    def run(self) -> None:
        last: BaseException | None = None
        with contextlib.suppress(RuntimeError, concurrent.futures.CancelledError):  # the loop has ended
            try:
                for item in lines_of(self._source):
                    self._put(item)
            except Exception as error:
                last = error
            self._put(last)

    def _put(self, item: tuple[int, bytes] | BaseException | None) -> None:
        putting = self.lines.put(item)
        try:
            asyncio.run_coroutine_threadsafe(putting, self._loop).result()
        except BaseException:
            putting.close()
            raise


class BatchRun:
    """One run. ``num_parallel`` requests are with the engine at a time."""

    def __init__(self, app: ASGIApp, results: ResultFile, num_parallel: int, size: int | None) -> None:
        self._app = app
        self._results = results
        self._room = asyncio.Semaphore(num_parallel)
        self._begun = time.monotonic()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._bar = tqdm(
            total=size, unit="B", unit_scale=True, desc="Running batch", disable=not sys.stderr.isatty(), leave=False
        )
        self.num_ok = self.num_failed = self.prompt_tokens = self.completion_tokens = 0

    async def run(self, source: BinaryIO | Any) -> None:
        """Run every line of ``source`` that has no result yet.

        Raises:
            OSError: input or output failed.
            EngineDeadError: the engine died; lines in flight have no result.
        """
        reader = _Reader(source, asyncio.get_running_loop())
        self._lines = reader.lines
        reader.start()
        try:
            while (item := await reader.lines.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                number, line = item
                if number == 0:
                    self._results.begin(line)
                if self._results.has(number) or not line.strip():
                    self._bar.update(len(line))
                    continue
                await self._room.acquire()
                if self._failure is not None:
                    break
                task = asyncio.create_task(self._one(number, line))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._bar.close()
        if self._failure is not None:
            raise self._failure

    async def _one(self, number: int, line: bytes) -> None:
        try:
            outcome = await run_line(self._app, self._results.id_of(number), line, MAX_LINE_BYTES)
            if self._failure is None:
                await self._keep(outcome)
                self._bar.update(len(line))
        except Exception as error:  # the reading loop raises it, and may be waiting for a line that never comes
            if self._failure is None:
                self._failure = error
                self._tasks.add(asyncio.create_task(self._lines.put(error)))
        finally:
            self._room.release()

    async def _keep(self, outcome: Outcome) -> None:
        if outcome.status >= 500:
            await self._check()
        self._results.write(outcome.line)
        if outcome.status == 200:
            self.num_ok += 1
        else:
            self.num_failed += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.completion_tokens += outcome.completion_tokens
        if not self._bar.disable:
            rate = self.completion_tokens / (time.monotonic() - self._begun)
            self._bar.set_postfix_str(f"{self.num_ok + self.num_failed} lines, {rate:.0f} tok/s", refresh=False)

    async def _check(self) -> None:
        """Raise when the engine is dead: such a line gets its result in the run that resumes."""

    def summary(self) -> str:
        seconds = time.monotonic() - self._begun
        kept = f", {self._results.num_kept} kept from before" if self._results.num_kept else ""
        return (
            f"Batch: {self.num_ok} answered, {self.num_failed} failed{kept}; {seconds:.1f} s, "
            f"{self.prompt_tokens} prompt tokens, {self.completion_tokens} generated "
            f"({self.completion_tokens / seconds if seconds else 0:.1f} tok/s)"
        )


class _EngineRun(BatchRun):
    engine: AsyncLLM

    async def _check(self) -> None:
        await self.engine.check_health()


async def run_engine(
    config: VllmConfig,
    frontend: FrontendConfig,
    process: EngineProcess,
    registry: CollectorRegistry,
    source: Any,
    size: int | None,
    results: ResultFile,
) -> int:
    """Run a batch over an engine that is starting; the exit code: 0, or 128 + the signal that stopped it."""
    loop = asyncio.get_running_loop()
    stopped: list[int] = []
    main = asyncio.current_task()
    assert main is not None

    def stop(number: int) -> None:
        if not stopped:
            main.cancel()
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    loggers: list[StatLogger] = []
    metrics = None
    if not config.observability_config.disable_log_stats:
        names = config.model_config.served_model_name or [config.model_config.model]
        metrics = PrometheusMetrics(registry, names[0], config.model_config.max_model_len or 0)
        loggers = [metrics]
    engine = AsyncLLM.from_vllm_config(config, process, loggers, None)
    run = None
    try:
        app = build_app(engine, config, frontend, registry)
        ready = await engine.wait_ready()
        if metrics is not None:
            metrics.record_ready(config.cache_config, ready, max_concurrency(ready))
        run = _EngineRun(app, results, 2 * (config.scheduler_config.max_num_seqs or 64), size)
        run.engine = engine
        await run.run(source)
        return 0
    except asyncio.CancelledError:
        if not stopped:
            raise
        main.uncancel()
        logger.info("Stopped by a signal; --resume goes on with what is missing.")
        return 128 + stopped[0]
    finally:
        if run is not None:
            logger.info("%s", run.summary())
        with contextlib.suppress(EngineDeadError):
            await engine.shutdown()


@contextlib.contextmanager
def metrics_server(registry: CollectorRegistry, host: str | None, port: int) -> Iterator[None]:
    """Serve metrics meanwhile.

    Raises:
        OSError: the address is taken or not ours.
    """
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, host or "0.0.0.0", registry)
    except OSError as error:
        raise OSError(f"--port {port}: {error.strerror}; stop the other server or choose another port.") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
