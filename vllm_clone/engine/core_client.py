"""How asyncio code talks to an engine: in a child process, or in a thread of this one."""

import asyncio
import contextlib
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from vllm_clone import envs
from vllm_clone.config import VllmConfig
from vllm_clone.engine.engine_process import EngineProcess
from vllm_clone.engine.shared_engine import AttachedEngine
from vllm_clone.errors import ConfigError, EngineDeadError, ModelLoadError
from vllm_clone.logger import init_logger
from vllm_clone.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineFailed,
    EngineReady,
    FromEngine,
    ShutdownRequest,
    ToEngine,
    UtilityCall,
    UtilityResult,
)

logger = init_logger(__name__)

GRACE_SECONDS = 2.0
"""What the engine gets beyond the drain time to answer open requests and end."""
TERM_SECONDS = 1.0
"""What it gets after SIGTERM, before SIGKILL."""
MESSAGES_PER_TURN = 64
"""Most messages taken before other tasks of the event loop get their turn."""


class CoreClient(ABC):
    """One engine as seen from one event loop. Every method is called in that loop's thread."""

    def __init__(self) -> None:
        self.index = 0
        """Which of the engine's clients this is."""
        self.dead: EngineDeadError | None = None
        """Why nothing can be generated any more; None while the engine lives."""
        self._outputs: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self.ended = asyncio.Event()
        self._end_expected = False
        self._ping_sent: float | None = None
        """Monotonic time of the ping that is not answered yet."""
        self._heart: asyncio.Task[None] | None = None

    # ---- what the subclasses do ----

    @abstractmethod
    async def wait_ready(self) -> EngineReady:
        """Return once the engine turns.

        Raises:
            EngineDeadError: it cannot start; the message is the cause and the remedy in one line.
        """

    @abstractmethod
    def _send(self, message: ToEngine) -> None: ...

    @abstractmethod
    async def _end(self) -> None:
        """Make the engine end that has not done so in time, and release everything."""

    def _take_messages(self) -> None:
        """Take in what has already arrived."""
        return

    # ---- requests ----

    def add(self, request: EngineCoreRequest) -> None:
        request.client_index = self.index
        self._send_alive(request)

    def abort(self, request_ids: list[str]) -> None:
        """Free requests in the engine; nothing to do when it is dead."""
        if request_ids and self.dead is None:
            self._send(AbortRequests(request_ids))

    async def receive(self) -> EngineCoreOutputs:
        """The next outputs.

        Raises:
            EngineDeadError: the engine has ended, and all it said before has been received.
        """
        outputs = await self._outputs.get()
        if outputs is None:
            self._outputs.put_nowait(None)  # for the next caller
            assert self.dead is not None
            raise self.dead
        return outputs

    async def call(self, method: str, *args: Any) -> Any:
        """Call an engine utility.

        Raises:
            EngineDeadError: the engine has ended.
            RuntimeError: the utility failed; the engine goes on.
        """
        return await self._call(method, list(args))

    async def check_health(self) -> None:
        """Return when the engine lives and its loop has turned within VLLM_ENGINE_HEALTH_TIMEOUT seconds.

        Raises:
            EngineDeadError: otherwise. A loop that hangs may turn again; then so does this.
        """
        self._take_messages()
        if self.dead is not None:
            raise self.dead
        limit = envs.VLLM_ENGINE_HEALTH_TIMEOUT
        waited = 0.0 if self._ping_sent is None else time.monotonic() - self._ping_sent
        if limit > 0 and waited > limit * 0.75:  # a ping is sent every quarter of the limit
            raise EngineDeadError(f"The engine loop has not turned for more than {waited:.1f} s.")

    async def shutdown(self, timeout: float = 0.0) -> None:
        """End the engine: open requests may finish for ``timeout`` seconds, then they are aborted.

        Bounded; may be called again with a shorter timeout while it runs.
        """
        self._end_expected = True
        if self._heart is not None:
            self._heart.cancel()
        if self.dead is None and self._heart is not None:
            self._send(ShutdownRequest(timeout))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), timeout + GRACE_SECONDS)
        await self._end()
        self.die("The engine has been shut down.")

    # ---- for the subclasses ----

    def _started(self) -> None:
        """The engine turns; from now on its pulse is taken."""
        self._heart = asyncio.create_task(self._beat(), name="engine-heartbeat")

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, EngineCoreOutputs):
            if message.utility_result is not None:
                self._answer(message.utility_result)
            if message.outputs or message.scheduler_stats is not None:
                self._outputs.put_nowait(message)
        elif isinstance(message, EngineFailed):
            self.die(message.message)

    def die(self, why: str) -> None:
        """The engine has ended; the first reason given counts."""
        self.ended.set()
        if self.dead is not None:
            return
        self.dead = EngineDeadError(why)
        if self._heart is not None:
            self._heart.cancel()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.dead)
        self._calls.clear()
        self._outputs.put_nowait(None)

    # ---- parts ----

    def _send_alive(self, message: ToEngine) -> None:
        if self.dead is not None:
            raise self.dead
        self._send(message)

    async def _call(self, method: str, args: list[Any]) -> Any:
        call_id = next(self._call_ids)
        self._send_alive(UtilityCall(call_id, method, args, self.index))
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    def _answer(self, result: UtilityResult) -> None:
        future = self._calls.get(result.call_id)
        if future is None or future.done():
            return
        if result.error is not None:
            future.set_exception(RuntimeError(result.error))
        else:
            future.set_result(result.result)

    async def _beat(self) -> None:
        """One ping every quarter of the health timeout, never two at once."""
        while envs.VLLM_ENGINE_HEALTH_TIMEOUT > 0:
            self._ping_sent = time.monotonic()
            with contextlib.suppress(EngineDeadError):
                await self._call("ping", [])
            self._ping_sent = None
            await asyncio.sleep(envs.VLLM_ENGINE_HEALTH_TIMEOUT / 4)


class ProcessClient(CoreClient):
    """The engine is a child process. Its death is noticed by the kernel's word, not by looking."""

    def __init__(self, process: EngineProcess) -> None:
        super().__init__()
        self._process = process
        self._closing = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait_ready(self) -> EngineReady:
        process, loop = self._process, asyncio.get_running_loop()
        news = asyncio.Event()
        fds = (process.readable_fd, process.pidfd)
        for fd in fds:
            loop.add_reader(fd, news.set)
        try:
            while (ready := process.poll_ready()) is None:
                news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), process.seconds_to_start)
        finally:
            for fd in fds:
                loop.remove_reader(fd)
        if self._loop is None:
            self._loop = loop
            loop.add_reader(process.readable_fd, self._take_messages)
            loop.add_reader(process.pidfd, self._on_exit)
            self._take_messages()
            self._started()
        return ready

    def _send(self, message: ToEngine) -> None:
        self._process.send(message)

    def _take_messages(self) -> None:
        try:
            for _ in range(MESSAGES_PER_TURN):
                message = self._process.receive()
                if message is None:
                    return
                self._handle(message)
        except Exception as error:
            logger.exception("A message from the engine could not be taken in")
            self.die(f"A message from the engine could not be taken in: {error} (traceback above).")
        if self._loop is not None:
            self._loop.call_soon(self._take_messages)

    def _on_exit(self) -> None:
        self._forget_readers()
        try:
            for message in self._process.receive_last_words():
                self._handle(message)
        except Exception:
            logger.exception("The last message from the engine could not be taken in")
        how = self._process.exit_description()
        if self._end_expected:
            self.die("The engine has been shut down.")
        else:
            logger.error("The engine process %d ended unexpectedly (%s)", self._process.pid, how)
            self.die(f"The engine process ended unexpectedly ({how}); see the server log for the cause.")

    async def _end(self) -> None:
        process = self._process
        if self._loop is not None and not self.ended.is_set():
            for stop, seconds in ((process.terminate, TERM_SECONDS), (process.kill, GRACE_SECONDS)):
                stop()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), seconds)
                    break
        self._forget_readers()
        async with self._closing:
            await asyncio.to_thread(process.close)

    def _forget_readers(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.remove_reader(self._process.readable_fd)
            loop.remove_reader(self._process.pidfd)


class SharedClient(ProcessClient):
    """The engine has other clients too, and whoever started it ends it; see :mod:`vllm_clone.engine.shared_engine`."""

    def __init__(self, process: AttachedEngine) -> None:
        super().__init__(process)
        self.index = process.index

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Leave the engine alone; open requests must have been finished or aborted before."""
        self._end_expected = True
        if self._heart is not None:
            self._heart.cancel()
        await self._end()
        self.die("The server is shutting down.")

    async def _end(self) -> None:
        self._forget_readers()
        async with self._closing:
            await asyncio.to_thread(self._process.close)


class ThreadClient(CoreClient):
    """The engine loop runs in a thread of this process; for debugging, since Python's lock is then shared."""

    def __init__(self, config: VllmConfig, executor_factory: Callable[[VllmConfig], Any] | None = None) -> None:
        super().__init__()
        self._config = config
        self._executor_factory = executor_factory
        self._thread: threading.Thread | None = None
        self._put: Callable[[ToEngine], None] | None = None
        self._ready: asyncio.Future[EngineReady] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait_ready(self) -> EngineReady:
        if self._ready is None:
            self._loop = asyncio.get_running_loop()
            self._ready = self._loop.create_future()
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
            ready = await asyncio.shield(self._ready)
            self._started()
            return ready
        return await asyncio.shield(self._ready)

    def _send(self, message: ToEngine) -> None:
        assert self._put is not None, "wait_ready comes first"
        self._put(message)

    async def _end(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, TERM_SECONDS)

    def _run(self) -> None:
        """The engine thread."""
        try:
            self._turn()
            why = "The engine has been shut down."
        except (ConfigError, ModelLoadError) as error:
            why = str(error)
        except Exception as error:
            logger.exception("The engine failed")
            why = f"The engine failed: {type(error).__name__}: {error} (traceback above)."
        self._in_loop(self._on_end, why)

    def _turn(self) -> None:
        from vllm_clone.core.engine_core import EngineCore
        from vllm_clone.core.engine_loop import EngineLoop

        factory = self._executor_factory
        if factory is None:
            from vllm_clone.executor import get_executor_class

            factory = get_executor_class(self._config)
        core = EngineCore(self._config, factory)
        try:
            loop = EngineLoop(core, lambda client, outputs: self._in_loop(self._handle, outputs))
            self._put = loop.put
            self._in_loop(self._set_ready, core.ready_message(os.getpid()))
            loop.run()
        finally:
            core.shutdown()

    def _in_loop(self, function: Callable[[Any], None], argument: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, argument)

    def _set_ready(self, ready: EngineReady) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_result(ready)

    def _on_end(self, why: str) -> None:
        self.die(why)
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(self.dead or EngineDeadError(why))
