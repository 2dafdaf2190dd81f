"""The engine's loop: take messages, step, send. It blocks when there is nothing to do."""

import queue
import time
from collections.abc import Callable

from vllm_clone.core.engine_core import EngineCore
from vllm_clone.logger import init_logger
from vllm_clone.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ShutdownRequest,
    ToEngine,
    UtilityCall,
    UtilityResult,
)

logger = init_logger(__name__)

Send = Callable[[int, EngineCoreOutputs], None]
"""(client index, outputs) → hands them to the client; called by the loop's thread and the input thread."""


class EngineLoop:
    """Turns an :class:`EngineCore` until it is told to stop.

    ``put`` may be called by any thread, and by a signal handler. An exception put into the loop is raised by
    ``run``, so that a thread that serves the loop cannot fail in silence.
    """

    def __init__(self, core: EngineCore, send: Send) -> None:
        self._core = core
        self._send = send
        self._inbox: queue.SimpleQueue[ToEngine | BaseException | None] = queue.SimpleQueue()
        """None only wakes the loop."""
        core.grammars.on_compiled = lambda: self._inbox.put(None)
        self._stop_at: float | None = None
        """Monotonic time at which what still runs is aborted; None while the engine is not shutting down."""

    def put(self, message: ToEngine | BaseException) -> None:
        if isinstance(message, AbortRequests):
            # Twice: here it cannot overtake its request, there it is seen as soon as the forward pass is over.
            self._core.late_aborts.put(message.request_ids)
        self._inbox.put(message)

    def run(self) -> None:
        """Returns after a shutdown request, when every open request has been answered."""
        core = self._core
        while True:
            self._take_messages()
            if self._stop_at is not None:
                if core.num_unfinished and time.monotonic() >= self._stop_at:
                    core.scheduler.abort_all()
                if not core.has_work and not core.num_unfinished:
                    return
            if core.has_work:
                for client, outputs in core.step().items():
                    self._send(client, outputs)

    def _take_messages(self) -> None:
        while self._patience()[0] and self._inbox.empty() and self._core.use_idle_time():
            pass
        block, timeout = self._patience()
        while True:
            try:
                message = self._inbox.get(block, timeout)
            except queue.Empty:
                if timeout is not None:
                    self._core.grammars.expire()
                return
            self._handle(message)
            block = False

    def _patience(self) -> tuple[bool, float | None]:
        """Whether to wait for a message, and how many seconds at most."""
        core = self._core
        if core.has_work or (self._stop_at is not None and not core.num_unfinished):
            return False, None
        if not core.num_unfinished:
            return True, None
        # All that is left waits for grammars, which wake the loop, or are given up.
        limits = [core.grammars.seconds_to_expiry]
        if self._stop_at is not None:
            limits.append(max(self._stop_at - time.monotonic(), 0.0))
        return True, min((limit for limit in limits if limit is not None), default=None)

    def _handle(self, message: ToEngine | BaseException | None) -> None:
        if message is None:
            return
        if isinstance(message, EngineCoreRequest):
            self._add(message)
        elif isinstance(message, AbortRequests):
            self._core.abort_requests(message.request_ids)
        elif isinstance(message, UtilityCall):
            self._send(message.client_index, EngineCoreOutputs(utility_result=self._call(message)))
        elif isinstance(message, ShutdownRequest):
            stop_at = time.monotonic() + message.timeout
            self._stop_at = stop_at if self._stop_at is None else min(stop_at, self._stop_at)
        else:
            raise message

    def _add(self, request: EngineCoreRequest) -> None:
        if self._stop_at is not None:
            output: EngineCoreOutput | None = EngineCoreOutput(request.request_id, [], FinishReason.ABORT)
        else:
            output = self._core.add_request(request)
        if output is not None:
            self._send(request.client_index, EngineCoreOutputs([output], timestamp=time.monotonic()))

    def _call(self, call: UtilityCall) -> UtilityResult:
        if self._stop_at is not None and call.method != "ping":
            return UtilityResult(call.call_id, error="The engine is shutting down.")
        try:
            return UtilityResult(call.call_id, self._core.call(call.method, call.args))
        except Exception as error:
            logger.exception("Utility %s failed", call.method)
            return UtilityResult(call.call_id, error=f"{type(error).__name__}: {error}")
