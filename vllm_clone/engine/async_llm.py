"""AsyncLLM: the engine for asyncio code such as the HTTP server."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from vllm_clone.config import VllmConfig
from vllm_clone.engine.collector import Collector
from vllm_clone.engine.core_client import CoreClient, ProcessClient, SharedClient, ThreadClient
from vllm_clone.engine.engine_process import EngineProcess
from vllm_clone.engine.input_processor import InputProcessor
from vllm_clone.engine.inputs import ProcessedRequest, PromptType, TokensPrompt
from vllm_clone.engine.output_processor import OutputProcessor
from vllm_clone.engine.shared_engine import AttachedEngine, Board
from vllm_clone.errors import EngineDeadError, RequestError
from vllm_clone.logger import init_logger
from vllm_clone.messages import EngineCoreOutputs, EngineReady
from vllm_clone.metrics.stats import IterationStats, StatLogger
from vllm_clone.outputs import RequestOutput
from vllm_clone.sampling_params import RequestOutputKind, SamplingParams
from vllm_clone.tokenizers import Tokenizer, get_tokenizer

logger = init_logger(__name__)

SLICE = 128
"""Outputs processed before other tasks of the event loop get their turn."""
INLINE_CHARS = 2048
"""Longest text that is tokenized in the event loop itself; a thread costs more than this much text."""


class AsyncLLM:
    """Many requests at once over one engine. All methods belong to one event loop.

    Attributes:
        tokenizer: None with ``skip_tokenizer_init``.
        ready: what the engine said when it was ready; None before.
    """

    def __init__(
        self,
        config: VllmConfig,
        client: CoreClient,
        tokenizer: Tokenizer | None,
        stat_loggers: Sequence[StatLogger] = (),
        board: Board | None = None,
    ) -> None:
        self.vllm_config = config
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(config, tokenizer, client.index)
        self.output_processor = OutputProcessor(tokenizer, config.scheduler_config.stream_interval)
        self.stat_loggers: list[StatLogger] = list(stat_loggers)
        self.ready: EngineReady | None = None
        self._client = client
        self._handler: asyncio.Task[None] | None = None
        self._draining = False
        self._board = board
        self._idle = asyncio.Event()
        """Set when no request is open any more and none is taken."""

    @classmethod
    def from_vllm_config(
        cls,
        config: VllmConfig,
        process: EngineProcess | None = None,
        stat_loggers: Sequence[StatLogger] = (),
        board: Board | None = None,
    ) -> "AsyncLLM":
        """An AsyncLLM over an engine process, or over an engine thread of this process when there is none.

        ``board`` counts the requests of the other clients of a shared engine, for limits that hold for all together.
        The engine may still be loading; await :meth:`wait_ready` before the first request.
        """
        model = config.model_config
        tokenizer = None
        if not model.skip_tokenizer_init:
            tokenizer = get_tokenizer(model.tokenizer_path, model.tokenizer_mode, model.trust_remote_code)
        client: CoreClient
        if isinstance(process, AttachedEngine):
            client = SharedClient(process)
        else:
            client = ProcessClient(process) if process is not None else ThreadClient(config)
        return cls(config, client, tokenizer, stat_loggers, board)

    async def wait_ready(self) -> EngineReady:
        """Return once the engine takes requests.

        Raises:
            EngineDeadError: it cannot start; the message is the cause and the remedy in one line.
        """
        self.ready = await self._client.wait_ready()
        self.vllm_config.model_config.max_model_len = self.ready.max_model_len
        if self._handler is None:
            self._handler = asyncio.create_task(self._handle_outputs(), name="engine-outputs")
        return self.ready

    # ---- requests ----

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as ``sampling_params.output_kind`` wants them; closing the generator aborts it.

        Raises:
            RequestError: the request cannot be served.
            EngineDeadError: the engine has ended.
        """
        request = await self.prepare(
            prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt, arrival_time=arrival_time
        )
        async with contextlib.aclosing(self.stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> ProcessedRequest:
        """Validate and tokenize a request without starting it, so that a bad one fails before any answer begins.

        Raises:
            RequestError: the request cannot be served, or not now.
            EngineDeadError: the engine has ended.
        """
        self._admit()
        if isinstance(prompt, str) and len(prompt) > INLINE_CHARS:
            prompt = TokensPrompt(await asyncio.to_thread(self._encode, prompt, sampling_params), prompt)
        if sampling_params.structured_outputs is not None:
            await asyncio.to_thread(self.input_processor.check_grammar, sampling_params)
        return self.input_processor.process(
            request_id, prompt, sampling_params, arrival_time=arrival_time, priority=priority, cache_salt=cache_salt
        )

    async def stream(self, request: ProcessedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Start a prepared request; see :meth:`generate`."""
        self._admit()
        collector = Collector(request.params.output_kind is RequestOutputKind.DELTA)
        state = self.output_processor.add(request, collector.put)
        self._count()
        try:
            for sequence in request.sequences:
                try:
                    self._client.add(sequence)
                except (TypeError, OverflowError, UnicodeEncodeError) as error:
                    raise RequestError(f"The request holds a value that cannot be sent: {error}") from error
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            self._client.abort(self.output_processor.discard(state))
            self._count()

    async def abort(self, request_id: str) -> None:
        """End every request of that id; their consumers get a last output with finish reason ``abort``."""
        self._client.abort(self.output_processor.abort(request_id))

    # ---- the engine ----

    async def utility(self, method: str, *args: Any) -> Any:
        """Call an engine method by name (``reset_prefix_cache`` …).

        Raises:
            EngineDeadError: the engine has ended.
            RuntimeError: the method failed; the engine goes on.
        """
        return await self._client.call(method, *args)

    async def check_health(self) -> None:
        """Return when requests can be served now.

        Raises:
            EngineDeadError: the engine is dead, hangs, or is being shut down.
        """
        if self._draining:
            raise EngineDeadError("The server is shutting down.")
        await self._client.check_health()

    @property
    def errored(self) -> bool:
        """Whether the engine has ended."""
        return self._client.dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        return self._client.dead or EngineDeadError()

    async def wait_dead(self) -> EngineDeadError:
        """Return the reason once the engine has ended, for whatever reason."""
        await self._client.ended.wait()
        return self.dead_error

    def stop_accepting(self) -> None:
        """From now on new requests are refused with "overloaded" (HTTP 503); those in flight go on."""
        self._draining = True

    async def shutdown(self, timeout: float = 0.0) -> None:
        """End the engine: open requests may finish for ``timeout`` seconds, then they are aborted with an answer.

        Bounded, leaves no process behind, and may be called again with a shorter timeout while it runs.
        """
        self.stop_accepting()
        # Consumers get their answer here and now, even when the engine hangs or is in the middle of a long step.
        cut = asyncio.get_running_loop().call_later(timeout, self._abort_all)
        try:
            if isinstance(self._client, SharedClient):
                await self._until_idle()
            await self._client.shutdown(timeout)
        finally:
            cut.cancel()
        if self._handler is not None:
            await asyncio.wait([self._handler])

    # ---- parts ----

    def _abort_all(self) -> None:
        self._client.abort(self.output_processor.abort_all())
        self._count()

    async def _until_idle(self) -> None:
        """Return when no request is open, or when the engine has ended."""
        self._count()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._client.ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _count(self) -> None:
        """The number of open requests may have changed."""
        outputs = self.output_processor
        if self._draining and not outputs.num_requests:
            self._idle.set()
        if self._board is not None:
            self._board.post("requests", outputs.num_requests)
            self._board.post("prefill_tokens", outputs.num_prefill_tokens)

    def _admit(self) -> None:
        if self._client.dead is not None:
            raise self._client.dead
        if self._draining:
            raise RequestError("The server is shutting down; try again later.", kind="overloaded")
        if self.ready is None:
            raise RequestError("The engine is still starting; try again later.", kind="overloaded")
        limits, outputs, board = self.vllm_config.scheduler_config, self.output_processor, self._board
        if limits.max_num_queued_reqs is not None:
            open_ = outputs.num_requests + (board.others("requests") if board is not None else 0)
            if open_ >= limits.max_num_queued_reqs:
                self._reject("max_num_queued_reqs", f"{open_} requests are in flight")
        if limits.max_num_queued_tokens is not None:
            waiting = outputs.num_prefill_tokens + (board.others("prefill_tokens") if board is not None else 0)
            if waiting >= limits.max_num_queued_tokens:
                self._reject("max_num_queued_tokens", f"{waiting} prompt tokens are waiting")

    def _reject(self, reason: str, state: str) -> None:
        for stat_logger in self.stat_loggers:
            stat_logger.record_rejection(reason)
        raise RequestError(f"The engine is busy: {state}; try again later.", kind="overloaded")

    def _encode(self, text: str, params: SamplingParams) -> list[int]:
        if params.truncate_prompt_tokens is not None and self.tokenizer is not None:
            return self.tokenizer.encode(text)
        return self.input_processor.encode(text)

    async def _handle_outputs(self) -> None:
        """Runs as long as the engine lives; whatever ends it reaches every open request."""
        try:
            while True:
                await self._handle_batch(await self._client.receive())
        except EngineDeadError as error:
            self.output_processor.fail_all(error)
        except Exception as error:
            logger.exception("The output handler failed")
            self._client.die(f"The output handler failed: {type(error).__name__}: {error} (traceback above).")
            self.output_processor.fail_all(self.dead_error)

    async def _handle_batch(self, batch: EngineCoreOutputs) -> None:
        stats = IterationStats()
        for start in range(0, len(batch.outputs), SLICE):
            if start:
                await asyncio.sleep(0)
            part = batch.outputs[start : start + SLICE]
            self._client.abort(self.output_processor.process(part, batch.timestamp, stats))
        if self._board is not None:
            self._count()
        for stat_logger in self.stat_loggers:
            try:
                stat_logger.record(batch.scheduler_stats, stats)
            except Exception:
                logger.exception("Statistics could not be recorded")
