"""The two ends of a batch: lines in, of any number, and results out that a killed run can go on from."""

import contextlib
import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

import httpx
import xxhash

from vllm_clone.errors import ConfigError
from vllm_clone.logger import init_logger

logger = init_logger(__name__)

MAX_LINE_BYTES = 64 * 2**20
UPLOAD_TRIES = 5
UPLOAD_PAUSE_SECONDS = 5.0
_ID = re.compile(rb'\{"id":"vllm-([0-9a-f]{6})([0-9a-f]{10})"')


class LineTooLong(ValueError):
    """A line of the input that is no request, whatever it says."""


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


class _Chunks:
    """``readline`` over the pieces of a download."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readline(self, limit: int) -> bytes:
        while (end := self._rest.find(b"\n")) < 0 and len(self._rest) < limit:
            piece = next(self._pieces, b"")
            if not piece:
                break
            self._rest += piece
        cut = min(len(self._rest) if end < 0 else end + 1, limit)
        line, self._rest = self._rest[:cut], self._rest[cut:]
        return line


@contextlib.contextmanager
def opened_input(name: str) -> Iterator[tuple[BinaryIO | _Chunks, int | None]]:
    """What lines are read from, and its size in bytes where that is known.

    Raises:
        OSError: it cannot be read; the message names it.
    """
    if name == "-":
        yield sys.stdin.buffer, None
    elif not is_url(name):
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            yield file, size or None
    else:
        try:
            with httpx.stream("GET", name, follow_redirects=True, timeout=60) as response:
                response.raise_for_status()
                length = response.headers.get("content-length")
                plain = "content-encoding" not in response.headers
                yield _Chunks(response.iter_bytes(2**16)), int(length) if length and plain else None
        except httpx.HTTPError as error:
            raise OSError(f"--input-file {name}: {error}") from error


def lines_of(source: BinaryIO | _Chunks) -> Iterator[tuple[int, bytes]]:
    """(number from 0, line); a line that is too long is cut after MAX_LINE_BYTES + 1."""
    number = 0
    while line := source.readline(MAX_LINE_BYTES + 1):
        piece = line
        while len(piece) > MAX_LINE_BYTES and not piece.endswith(b"\n"):
            piece = source.readline(MAX_LINE_BYTES + 1)
        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        number += 1


def mark_of(first_line: bytes) -> str:
    """Six hex digits that tell one input from another."""
    return xxhash.xxh64_hexdigest(first_line.strip())[:6]


class ResultFile:
    """The results of a batch. A result's id names its input line, so that the file alone tells what is done.

    Raises:
        ConfigError: another run writes the file, or with ``resume`` it is no result file.
    """

    def __init__(self, path: str, resume: bool) -> None:
        self._path = path
        self._done = bytearray()
        self._mark: str | None = None
        self.num_kept = 0
        if path == "-":
            self._file: BinaryIO = sys.stdout.buffer
            return
        self._file = open(path, "a+b")  # noqa: SIM115
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"--output-file {path}: another run writes it; wait for it or stop it.") from error
            if resume:
                self._recover()
            else:
                self._file.truncate(0)
        except BaseException:
            self._file.close()
            raise

    def _recover(self) -> None:
        """Note what is done and cut off what a killed run left of a line."""
        self._file.seek(0)
        whole = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                logger.info("The last line of %s is torn; its request runs again.", self._path)
                self._file.truncate(whole)
                break
            match = _ID.match(line)
            if match is None or self._mark not in (None, match[1].decode()):
                raise ConfigError(f"--resume: {self._path} holds lines of something else; choose another output file.")
            self._mark = match[1].decode()
            self._note(int(match[2], 16))
            whole += len(line)
        self._file.seek(0, os.SEEK_END)

    def _note(self, number: int) -> None:
        self._done.extend(b"\0" * (number // 8 + 1 - len(self._done)))
        self._done[number // 8] |= 1 << number % 8
        self.num_kept += 1

    def begin(self, first_line: bytes) -> None:
        """Learn which input the results are of.

        Raises:
            ConfigError: the results that are kept are of another one.
        """
        mark = mark_of(first_line)
        if self._mark not in (None, mark):
            raise ConfigError(f"--resume: {self._path} holds results of another input; choose another output file.")
        self._mark = mark

    def id_of(self, number: int) -> str:
        return f"vllm-{self._mark}{number:010x}"

    def has(self, number: int) -> bool:
        """Whether the result of a line was kept."""
        return number // 8 < len(self._done) and bool(self._done[number // 8] >> number % 8 & 1)

    def write(self, line: bytes) -> None:
        """Append one result, which the operating system has when this returns."""
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        if self._path != "-":
            self._file.close()


def upload(path: str, url: str) -> None:
    """PUT a file.

    Raises:
        OSError: the last try failed too.
    """
    for tries in range(1, UPLOAD_TRIES + 1):
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                headers = {"content-type": "application/octet-stream", "content-length": str(size)}
                httpx.put(url, content=file, headers=headers, timeout=600).raise_for_status()
            return
        except httpx.HTTPError as error:
            logger.error("Upload to %s failed (%d of %d): %s", url, tries, UPLOAD_TRIES, error)
            if tries == UPLOAD_TRIES:
                raise OSError(f"--output-file {url}: {error}; the results are kept in {path}.") from error
        time.sleep(UPLOAD_PAUSE_SECONDS)
