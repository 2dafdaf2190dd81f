"""`vllm run-batch`: the engine and the server's application, without a socket to listen on."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server
from tqdm import tqdm

from vllm_clone.config import FrontendConfig, VllmConfig
from vllm_clone.engine.async_llm import AsyncLLM
from vllm_clone.engine.engine_process import EngineProcess
from vllm_clone.entrypoints.batch.lines import Input, Output
from vllm_clone.entrypoints.batch.runner import READ_AHEAD, BatchRunner, Tally
from vllm_clone.entrypoints.launchers.api_server import max_concurrency, run_loop
from vllm_clone.entrypoints.launchers.app import build_app
from vllm_clone.errors import ConfigError
from vllm_clone.logger import init_logger
from vllm_clone.metrics.prometheus import make_metrics, new_registry
from vllm_clone.metrics.stats import StatLogger
from vllm_clone.utils.process import EarlySignals

logger = init_logger(__name__)

INTERRUPTED = 130
PLAIN_INTERVAL_S = 5.0
"""Between two lines of progress where there is no terminal."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a run needs. ``metrics_at``: address and port of its metrics; None for none."""

    config: VllmConfig
    frontend: FrontendConfig
    source: Input
    output: Output
    process: EngineProcess
    signals: EarlySignals
    metrics_at: tuple[str, int] | None


def run_batch(batch: Batch) -> int:
    """Answer every line of the input; the exit code: 0 however many failed, 1 when the engine dies.

    Raises:
        ConfigError: the metrics' port is taken.
        EngineDeadError: the engine cannot start.
        OSError: the input cannot be read, or the output not be written or sent.
    """
    code = run_loop(_run(batch))
    if code == 0:
        batch.output.finish()
    return code


async def _run(batch: Batch) -> int:
    registry, config = new_registry(), batch.config
    with _metrics_server(registry, batch.metrics_at):
        metrics = make_metrics(config, registry) if batch.metrics_at is not None else None
        loggers: list[StatLogger] = [] if metrics is None else [metrics]
        engine = AsyncLLM.from_vllm_config(config, batch.process, loggers)
        main = asyncio.current_task()
        assert main is not None
        stopped: list[int] = []
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            stopped.append(number)
            main.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            if batch.signals.count:
                return INTERRUPTED
            app = build_app(engine, config, batch.frontend, registry)
            ready = await engine.wait_ready()
            if metrics is not None:
                metrics.record_ready(config.cache_config, ready, max_concurrency(ready))
            return await _answer_all(engine, app, batch)
        except asyncio.CancelledError:
            if not stopped:
                raise
            _say(f"Stopped by a signal. {batch.output.left}")
            return INTERRUPTED
        finally:
            await engine.shutdown()


async def _answer_all(engine: AsyncLLM, app: object, batch: Batch) -> int:
    source, output = batch.source, batch.output
    with _progress(await asyncio.to_thread(source.count)) as bar:

        def show(tally: Tally) -> None:
            bar.update(tally.succeeded + tally.failed + tally.skipped - bar.n)
            elapsed = bar.format_dict["elapsed"]
            if elapsed:
                tokens = tally.prompt_tokens + tally.completion_tokens
                bar.set_postfix_str(f"{tokens / elapsed:.0f} tokens/s", refresh=False)

        runner = BatchRunner(app, output, _window(batch.config), lambda: not engine.errored, show)
        answering = asyncio.ensure_future(runner.run(source, read_ahead=READ_AHEAD if source.is_file else 1))
        dead = asyncio.ensure_future(engine.wait_dead())
        try:
            await asyncio.wait([answering, dead], return_when=asyncio.FIRST_COMPLETED)
        finally:
            dead.cancel()
            if not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
    if engine.errored:
        _say(f"vllm: error: {engine.dead_error} {output.left}")
        return 1
    answering.result()
    _say(runner.tally.line())
    return 0


def _window(config: VllmConfig) -> int:
    """Requests under way: enough that the engine never waits for one."""
    limits = config.scheduler_config
    assert limits.max_num_seqs is not None
    window = 2 * limits.max_num_seqs
    return window if limits.max_num_queued_reqs is None else max(1, min(window, limits.max_num_queued_reqs))


def _progress(total: int | None) -> "tqdm[None]":
    return tqdm(
        total=total,
        desc="Running batch",
        unit="req",
        file=sys.stderr,
        mininterval=0.1 if sys.stderr.isatty() else PLAIN_INTERVAL_S,
        dynamic_ncols=True,
    )


@contextlib.contextmanager
def _metrics_server(registry: CollectorRegistry, at: tuple[str, int] | None) -> Iterator[None]:
    if at is None:
        yield
        return
    host, port = at
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; choose another, or leave --enable-metrics out.") from error
    logger.info("Prometheus metrics are at http://%s:%d/metrics", host, port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
