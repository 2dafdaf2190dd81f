"""One engine process that several API servers share.

The supervisor opens a :class:`Door` per API server and starts the engine with the doors' files; each API server is
handed its door's listening sockets and becomes an :class:`AttachedEngine`. The supervisor alone ends the engine.
"""

import contextlib
import mmap
import os
import shutil
import socket
from collections.abc import Iterator

import zmq

from vllm_clone import envs
from vllm_clone.engine.engine_process import EngineProcess, private_directory

DOOR_BACKLOG = 16


class Door:
    """Where the engine finds one client: two Unix sockets that listen, and whose files have no name any more."""

    def __init__(self) -> None:
        directory = private_directory()
        try:
            self._to_engine, self.input_file = _listen(f"{directory}/in")
            self._from_engine, self.output_file = _listen(f"{directory}/out")
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def listening(self) -> tuple[int, int]:
        """Descriptors for the client: towards the engine, and from it."""
        return self._to_engine.fileno(), self._from_engine.fileno()

    def close(self) -> None:
        """Let go of this process's descriptors, once engine and client have inherited them."""
        self._to_engine.close()
        self._from_engine.close()
        os.close(self.input_file)
        os.close(self.output_file)


@contextlib.contextmanager
def doors(count: int) -> Iterator[list[Door]]:
    """``count`` doors, let go of at the end."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(Door())
            stack.callback(made[-1].close)
        yield made


def _listen(path: str) -> tuple[socket.socket, int]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(DOOR_BACKLOG)
    listener.setblocking(False)
    return listener, os.open(path, os.O_PATH | os.O_CLOEXEC)


class AttachedEngine(EngineProcess):
    """An engine that another process has started and will end, as one of its clients sees it."""

    def __init__(self, pid: int, listening: tuple[int, int], index: int) -> None:
        """``listening``: see :attr:`Door.listening`; ``index``: the door's place among all of them."""
        super().__init__(_Elsewhere(pid), _Bound(listening), envs.VLLM_ENGINE_READY_TIMEOUT_S)
        self.index = index

    def _end_process(self) -> None:
        """The supervisor does that."""


class _Elsewhere:
    """A process that is no child of this one: its exit can be seen, its exit status cannot."""

    stdin = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        return None

    def terminate(self) -> None:
        """Its parent does that."""

    kill = terminate


class _Bound:
    """A client's ends of both directions, on sockets that already listen."""

    def __init__(self, listening: tuple[int, int]) -> None:
        self._context = zmq.Context()
        self.to_engine = self._context.socket(zmq.PUSH)
        self.from_engine = self._context.socket(zmq.PULL)
        for wire, fd in zip((self.to_engine, self.from_engine), listening, strict=True):
            wire.set_hwm(0)
            wire.linger = 0
            wire.setsockopt(zmq.USE_FD, fd)  # the socket owns it from now on
            wire.bind(f"ipc:///{fd}")  # a name that is never looked up

    def close(self) -> None:
        self.to_engine.close()
        self.from_engine.close()
        self._context.term()


class Board:
    """Counts that API servers show each other: a row each, in memory they share. Whole numbers below 2^63.

    A row is written by its owner alone; sums may mix numbers of slightly different age.
    """

    COLUMNS = ("requests", "prefill_tokens", "load")

    def __init__(self, fd: int, num_rows: int, row: int) -> None:
        """``fd`` comes from :meth:`memory`."""
        self._row = row
        self._map = mmap.mmap(fd, 8 * len(self.COLUMNS) * num_rows)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def memory(cls, num_rows: int) -> int:
        """A descriptor of new memory, all zero, that has no name."""
        fd = os.memfd_create("vllm-board")
        os.truncate(fd, 8 * len(cls.COLUMNS) * num_rows)
        return fd

    def post(self, column: str, value: int) -> None:
        self._cells[self._row * len(self.COLUMNS) + self.COLUMNS.index(column)] = value

    def others(self, column: str) -> int:
        """The sum over all rows but one's own."""
        width, place = len(self.COLUMNS), self.COLUMNS.index(column)
        return sum(self._cells[i] for i in range(place, len(self._cells), width) if i // width != self._row)
