"""The engine's own process: ``python -m vllm_clone.core.engine_core_proc``, started by the API server.

Its standard input carries one line of JSON, a :class:`Boot`, and then stays open as a lifeline: when it ends,
the parent is gone and this process ends too. Three threads: one decodes what clients send, the main one turns
the engine, one encodes what goes back.
"""

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import zmq

from vllm_clone.config import VllmConfig
from vllm_clone.errors import ConfigError, ModelLoadError
from vllm_clone.logger import init_logger, set_process_name
from vllm_clone.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineFailed,
    FinishReason,
    FromEngine,
    ShutdownRequest,
    ToEngine,
)
from vllm_clone.utils.process import die_with_parent, watch_lifeline

if TYPE_CHECKING:
    from vllm_clone.core.engine_core import ExecutorFactory
    from vllm_clone.core.engine_loop import EngineLoop

logger = init_logger(__name__)

FLUSH_SECONDS = 2.0
"""Longest time the last messages may take to leave this process."""


class Boot(msgspec.Struct):
    """What the parent tells the engine process first."""

    config: VllmConfig
    input_addresses: list[str]
    """One per client; the engine pulls from all of them."""
    output_addresses: list[str]
    """Address i is where client i listens."""
    parent_pid: int
    started_by_main_thread: bool


class Wire:
    """The sockets and the two threads that serve them.

    ``on_message`` gets every decoded message and every exception that ends a thread.
    """

    def __init__(self, boot: Boot) -> None:
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._input.set_hwm(0)
        for address in boot.input_addresses:
            self._input.connect(address)
        self._outputs = [self._context.socket(zmq.PUSH) for _ in boot.output_addresses]
        for socket, address in zip(self._outputs, boot.output_addresses, strict=True):
            socket.set_hwm(0)
            socket.linger = int(FLUSH_SECONDS * 1000)
            socket.connect(address)
        self._outbox: queue.SimpleQueue[tuple[int, FromEngine] | None] = queue.SimpleQueue()
        self._on_message: Callable[[ToEngine | BaseException], None] = self._raise_later
        self._early_failure: BaseException | None = None
        self._receiving = False
        self._sender = threading.Thread(target=self._send_all, name="output", daemon=True)
        self._sender.start()

    def start_receiving(self, on_message: Callable[[ToEngine | BaseException], None]) -> None:
        self._on_message = on_message
        if self._early_failure is not None:
            on_message(self._early_failure)
        self._receiving = True
        threading.Thread(target=self._receive_all, name="input", daemon=True).start()

    def send(self, client: int, message: FromEngine) -> None:
        self._outbox.put((client, message))

    def broadcast(self, message: FromEngine) -> None:
        for client in range(len(self._outputs)):
            self.send(client, message)

    def close(self) -> None:
        """Send what is queued, then close; bounded by :data:`FLUSH_SECONDS`."""
        self._outbox.put(None)
        self._sender.join(FLUSH_SECONDS)
        if not self._receiving:
            self._input.close()
        self._context.term()  # ends the input thread; waits for the peers to take the last bytes

    def _raise_later(self, error: ToEngine | BaseException) -> None:
        assert isinstance(error, BaseException)
        self._early_failure = error

    def _send_all(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        try:
            while (item := self._outbox.get()) is not None:
                client, message = item
                self._outputs[client].send(self._encode(encoder, message))
        except Exception as error:
            self._on_message(error)
        finally:
            for socket in self._outputs:
                socket.close()

    @staticmethod
    def _encode(encoder: msgspec.msgpack.Encoder, message: FromEngine) -> bytes:
        try:
            return encoder.encode(message)
        except (TypeError, OverflowError) as error:
            # Only a utility may return what cannot travel.
            if not isinstance(message, EngineCoreOutputs) or message.utility_result is None:
                raise
            result = msgspec.structs.replace(message.utility_result, result=None, error=str(error))
            return encoder.encode(msgspec.structs.replace(message, utility_result=result))

    def _receive_all(self) -> None:
        decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        try:
            while True:
                frame = self._input.recv()
                try:
                    message = decoder.decode(frame)
                except (msgspec.MsgspecError, ValueError) as error:
                    self._refuse(frame, error)
                else:
                    self._on_message(message)
        except zmq.ContextTerminated:
            self._input.close()
        except Exception as error:
            self._on_message(error)

    def _refuse(self, frame: bytes, error: Exception) -> None:
        """Answer a request that cannot be decoded; only this one fails."""
        logger.error("A message from a client cannot be decoded: %s", error)
        fields: Any = None
        with contextlib.suppress(msgspec.MsgspecError):
            fields = msgspec.msgpack.decode(frame)
        if not isinstance(fields, list) or len(fields) < 2 or fields[0] != EngineCoreRequest.__name__:
            return
        position = 1 + EngineCoreRequest.__struct_fields__.index("client_index")
        client = fields[position] if len(fields) > position else 0
        if isinstance(fields[1], str) and isinstance(client, int) and 0 <= client < len(self._outputs):
            message = f"The request cannot be decoded: {error}"
            output = EngineCoreOutput(fields[1], [], FinishReason.ERROR, error=message)
            self.send(client, EngineCoreOutputs([output]))


def main(executor_factory: "ExecutorFactory | None" = None) -> int:
    """Run the engine until its parent says so or is gone; the exit status.

    ``executor_factory`` stands in for the platform's executor.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    set_process_name("EngineCore")
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1  # the parent died while it wrote
    boot = msgspec.json.decode(line, type=Boot)
    if boot.started_by_main_thread:
        die_with_parent(boot.parent_pid)
    watch_lifeline(sys.stdin.fileno(), lambda: os._exit(1))
    wire = Wire(boot)
    try:
        _serve(boot.config, wire, executor_factory)
    except (ConfigError, ModelLoadError) as error:
        wire.broadcast(EngineFailed(str(error)))
        return 1
    except Exception as error:
        logger.exception("The engine failed")
        wire.broadcast(EngineFailed(f"The engine failed: {type(error).__name__}: {error} (traceback above)."))
        return 1
    finally:
        wire.close()
    return 0


def _serve(config: VllmConfig, wire: Wire, executor_factory: "ExecutorFactory | None") -> None:
    from vllm_clone.core.engine_core import EngineCore
    from vllm_clone.core.engine_loop import EngineLoop

    if executor_factory is None:
        from vllm_clone.executor import get_executor_class

        executor_factory = get_executor_class(config)
    core = EngineCore(config, executor_factory)
    try:
        loop = EngineLoop(core, wire.send)
        _stop_on_sigterm(loop)
        wire.start_receiving(loop.put)
        wire.broadcast(core.ready_message(os.getpid()))
        loop.run()
    finally:
        core.shutdown()


def _stop_on_sigterm(loop: "EngineLoop") -> None:
    def stop(signum: int, frame: FrameType | None) -> None:
        loop.put(ShutdownRequest())

    signal.signal(signal.SIGTERM, stop)


def run_and_exit(executor_factory: "ExecutorFactory | None" = None) -> NoReturn:
    """:func:`main`, then end the process without the interpreter's teardown, which takes a second once torch is in."""
    status = 1
    try:
        status = main(executor_factory)
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    run_and_exit()
