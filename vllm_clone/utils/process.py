"""Small facts of life between parent and child processes on Linux."""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends. Linux only; else nothing.

    Only right when a thread that lives as long as the parent started this process, such as its main thread.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def watch_lifeline(fd: int, on_end: Callable[[], None]) -> threading.Thread:
    """Call ``on_end`` in a thread once the pipe ``fd`` reaches its end: its only writer, the parent, is gone."""

    def wait() -> None:
        while os.read(fd, 4096):
            pass
        on_end()

    thread = threading.Thread(target=wait, name="lifeline", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Hold back SIGINT in this thread; a process started meanwhile inherits the block, so Ctrl-C cannot hit it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EarlySignals:
    """SIGINT and SIGTERM between the start of an engine and the event loop that will handle them.

    The first is only counted: a KeyboardInterrupt in the middle of an import can be lost, since some extension
    modules clear whatever error their optional imports raise. The second ends the process at once.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "EarlySignals":
        self._before = {sig: signal.signal(sig, self._note) for sig in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            os._exit(128 + number)


def wait_readable(fds: list[int], timeout: float | None) -> list[int]:
    """Those of ``fds`` that can be read, as soon as one can; [] after ``timeout`` seconds."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else max(timeout, 0) * 1000)]


def describe_exit(returncode: int | None) -> str:
    """``exit code 1`` or ``signal SIGKILL``."""
    if returncode is None:
        return "no exit status"
    if returncode < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"
