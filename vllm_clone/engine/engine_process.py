"""The parent's end of an engine process: start it, hear that it is ready, end it. Nothing is left behind."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Protocol

import msgspec
import zmq

from vllm_clone import envs
from vllm_clone.config import VllmConfig
from vllm_clone.core.engine_core_proc import Boot
from vllm_clone.errors import EngineDeadError
from vllm_clone.logger import init_logger
from vllm_clone.messages import EngineFailed, EngineReady, FromEngine, ShutdownRequest, ToEngine
from vllm_clone.utils.process import describe_exit, interrupts_blocked, wait_readable

logger = init_logger(__name__)

ENGINE_MODULE = "vllm_clone.core.engine_core_proc"
MAX_SOCKET_PATH = 100
"""Unix socket paths may have 107 bytes on Linux and 103 on macOS."""
TERM_SECONDS = 2.0
"""What a process gets between SIGTERM and SIGKILL."""
LAST_WORDS_SECONDS = 0.1
"""How long a message of a dead engine may still be on its way through this process."""


def launch(
    config: VllmConfig, input_files: list[int], output_files: list[int], module: str = ENGINE_MODULE
) -> "subprocess.Popen[bytes]":
    """Start the engine in a child process and return while it still loads.

    Descriptors ``input_files[i]`` and ``output_files[i]`` are the socket files of client i. The child's standard input
    must stay open as long as it shall live.
    """
    boot = Boot(
        config=config,
        input_addresses=[_address(fd) for fd in input_files],
        output_addresses=[_address(fd) for fd in output_files],
        parent_pid=os.getpid(),
        started_by_main_thread=threading.current_thread() is threading.main_thread(),
    )
    return start_child(module, msgspec.json.encode(boot), (*input_files, *output_files))


def start_child(module: str, boot: bytes, fds: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    """Run a module in a process that inherits ``fds`` and reads one line, ``boot``, from its standard input."""
    with interrupts_blocked():
        process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=fds, env=envs.of_engine()
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its exit is noticed soon enough
        process.stdin.write(boot + b"\n")
        process.stdin.flush()
    return process


class Process(Protocol):
    """What is asked of a process; a Popen can do it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    def wait(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Wires(Protocol):
    """A client's ends of both directions."""

    @property
    def to_engine(self) -> "zmq.Socket[bytes]": ...
    @property
    def from_engine(self) -> "zmq.Socket[bytes]": ...
    def close(self) -> None: ...


class EngineProcess:
    """A running engine process and the sockets to it. Used by one thread at a time.

    Made by :meth:`start`; ended by :meth:`close`, which every path must reach.
    """

    def __init__(self, process: Process, sockets: Wires, timeout: float) -> None:
        self._process = process
        self._deadline = time.monotonic() + timeout
        self.pidfd = os.pidfd_open(process.pid)
        """Readable once the process has ended."""
        self._sockets = sockets
        self._to_engine, self._from_engine = sockets.to_engine, sockets.from_engine
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._ready: EngineReady | None = None
        self._closed = False

    @classmethod
    def start(cls, config: VllmConfig, module: str = ENGINE_MODULE) -> "EngineProcess":
        """Start the engine in a child process and return while it still loads.

        ``module`` is what the child runs; it must behave as :mod:`vllm_clone.core.engine_core_proc`.
        """
        with contextlib.ExitStack() as undo:
            sockets = _Sockets()
            undo.callback(sockets.close)
            process = launch(config, [sockets.input_file], [sockets.output_file], module)
            sockets.close_files()
            undo.pop_all()
        return cls(process, sockets, envs.VLLM_ENGINE_READY_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def readable_fd(self) -> int:
        """Becomes readable when messages may have come; edge-triggered, so take all with :meth:`receive`."""
        return int(self._from_engine.FD)

    def wait_ready(self) -> EngineReady:
        """Block until the engine turns.

        Raises:
            EngineDeadError: it cannot start; the message is the cause and the remedy in one line.
        """
        while (ready := self.poll_ready()) is None:
            wait_readable([self.pidfd, self.readable_fd], self.seconds_to_start)
        return ready

    @property
    def seconds_to_start(self) -> float:
        """What is left of the time the engine may take to start."""
        return max(self._deadline - time.monotonic(), 0.0)

    def poll_ready(self) -> EngineReady | None:
        """One look at how the start goes: None while it goes on. Raises like :meth:`wait_ready`."""
        if self._ready is not None:
            return self._ready
        gone = self.has_exited()
        if gone:
            self._await_message()
        message = self.receive()
        if isinstance(message, EngineReady):
            self._ready = message
            return message
        if isinstance(message, EngineFailed):
            raise EngineDeadError(message.message)
        if gone:
            raise EngineDeadError(
                f"The engine process ended during its start ({self.exit_description()}); its log is above."
            )
        if not self.seconds_to_start:
            raise EngineDeadError(
                f"The engine was not ready within {envs.VLLM_ENGINE_READY_TIMEOUT_S:g} s; "
                "raise VLLM_ENGINE_READY_TIMEOUT_S if the model needs longer to load."
            )
        return None

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. Lost when the engine is not connected: then it is dead, or about to be.

        Raises:
            TypeError, OverflowError: the message holds something msgpack cannot carry.
        """
        frame = self._encoder.encode(message)
        if not self._closed:
            with contextlib.suppress(zmq.Again):
                self._to_engine.send(frame, zmq.NOBLOCK)

    def receive(self) -> FromEngine | None:
        """The next message, None when there is none now."""
        if self._closed:
            return None
        try:
            return self._decoder.decode(self._from_engine.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def receive_last_words(self) -> list[FromEngine]:
        """Messages that a process which has ended left behind."""
        messages = []
        while self._await_message() and (message := self.receive()) is not None:
            messages.append(message)
        return messages

    def has_exited(self) -> bool:
        return bool(wait_readable([self.pidfd], 0))

    def exit_description(self) -> str:
        return describe_exit(self._process.wait() if self.has_exited() else None)

    def terminate(self) -> None:
        """SIGTERM: abort open requests with an answer and exit."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the process if it still runs (asked, then SIGTERM, then SIGKILL) and release everything."""
        if self._closed:
            return
        try:
            self._end_process()
        finally:
            self._closed = True
            os.close(self.pidfd)
            self._sockets.close()

    def _end_process(self) -> None:
        if not self.has_exited():
            self.send(ShutdownRequest())
            self.terminate()
            if not wait_readable([self.pidfd], TERM_SECONDS):
                logger.warning("The engine process %d did not end on SIGTERM; killing it", self.pid)
                self.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _await_message(self) -> bool:
        """The socket's own thread may need a moment to read what a process that just ended has sent."""
        return not self._closed and bool(self._from_engine.poll(int(LAST_WORDS_SECONDS * 1000)))


class _Sockets:
    """The parent's ends of both directions, bound to files that have no name any more.

    The engine connects through descriptors of the files, which it inherits, so that whenever either process is killed
    nothing is left in the file system, and no other process can connect.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.to_engine = self._context.socket(zmq.PUSH)
        self.from_engine = self._context.socket(zmq.PULL)
        directory = private_directory()
        files = []
        try:
            for socket, name in ((self.to_engine, "in"), (self.from_engine, "out")):
                socket.set_hwm(0)
                socket.linger = 0
                socket.bind(f"ipc://{directory}/{name}")
                files.append(os.open(f"{directory}/{name}", os.O_PATH | os.O_CLOEXEC))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self.input_file, self.output_file = files

    def close_files(self) -> None:
        """Once the engine has inherited them."""
        for fd in (self.input_file, self.output_file):
            os.close(fd)
        self.input_file = self.output_file = -1

    def close(self) -> None:
        if self.input_file >= 0:
            self.close_files()
        self.to_engine.close()
        self.from_engine.close()
        self._context.term()


def private_directory() -> str:
    """A new directory, mode 0700, whose path is short enough for a socket in it."""
    directory = tempfile.mkdtemp(prefix="vllm-")
    if len(directory) + len("/out") > MAX_SOCKET_PATH:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="vllm-", dir="/tmp")
    return directory


def _address(fd: int) -> str:
    """How a process that has inherited a socket file's descriptor connects to it."""
    return f"ipc:///proc/self/fd/{fd}"
