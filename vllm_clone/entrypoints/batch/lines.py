"""Lines of a batch: what comes in, what goes out, and which are done already."""

import fcntl
import json
import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import xxhash

from vllm_clone.errors import ConfigError
from vllm_clone.logger import init_logger

logger = init_logger(__name__)

MAX_LINE_BYTES = 64 << 20
"""Longest line that is read; the server takes no larger body either."""
UPLOADS = 5
UPLOAD_PAUSE_S = 5.0
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
"""Paths that a line may name."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input that is not blank."""

    number: int
    """From 1, blank lines counted."""
    text: bytes
    too_long: bool = False

    @property
    def id(self) -> str:
        """The same for the same line of the same file, so that a resumed run knows what it has answered."""
        return "vllm-" + xxhash.xxh3_64_hexdigest(self.text, seed=self.number)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a line asks for."""

    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(ValueError):
    """A line is no request; ``custom_id`` is what it calls itself, if anything."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def parse(line: Line) -> BatchRequest:
    """Read a line.

    Raises:
        LineError: it is no request that can be answered here; says why.
    """
    where = f"Line {line.number}"
    if line.too_long:
        raise LineError(f"{where} is longer than {MAX_LINE_BYTES} bytes.")
    try:
        value = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        raise LineError(f"{where} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise LineError(f"{where} must be a JSON object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str):
        raise LineError(f"{where}: custom_id must be a string.")
    url, body = value.get("url"), value.get("body")
    if not isinstance(value.get("method"), str) or not isinstance(url, str) or not isinstance(body, dict):
        raise LineError(f"{where}: method and url must be strings, and body an object.", custom_id)
    if url not in ENDPOINTS:
        raise LineError(f"The URL {url} is not supported in batches; supported are {', '.join(ENDPOINTS)}.", custom_id)
    if body.get("stream"):
        raise LineError("A batch has no streams; leave stream out.", custom_id)
    return BatchRequest(custom_id, url, body)


def answered(line: Line, custom_id: str | None, status: int, body: Any, error: Any) -> bytes:
    """An output line."""
    request_id = "vllm-batch-" + secrets.token_hex(8)
    response = {"status_code": status, "request_id": request_id, "body": body}
    value = {"id": line.id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


# ---- input ----


class Input:
    """A local file, ``-`` for standard input, or an http(s) URL. Only one line at a time is in memory.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._file: IO[bytes] | None = None
        if name == "-":
            self._file = sys.stdin.buffer
        elif not is_url(name):
            self._file = open(name, "rb")  # noqa: SIM115, closed by close()
        self.is_file = self._file is not None and Path(name).is_file()

    def count(self) -> int | None:
        """Lines that are not blank, or None where that cannot be told beforehand."""
        if not self.is_file:
            return None
        with open(self.name, "rb") as file:
            return sum(1 for _ in _lines(file))

    def __iter__(self) -> Iterator[Line]:
        if self._file is not None:
            yield from _lines(self._file)
            return
        # Downloaded first: a connection would not wait as long as a batch takes.
        with tempfile.TemporaryFile() as file:
            try:
                with httpx.stream("GET", self.name, follow_redirects=True, timeout=60) as response:
                    response.raise_for_status()
                    for part in response.iter_bytes():
                        file.write(part)
            except httpx.HTTPError as error:
                raise OSError(f"{self.name} cannot be downloaded: {error or type(error).__name__}") from error
            file.seek(0)
            yield from _lines(file)

    def close(self) -> None:
        if self._file is not None and self.name != "-":
            self._file.close()


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _lines(file: IO[bytes]) -> Iterator[Line]:
    number = 0
    while text := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        too_long = len(text) > MAX_LINE_BYTES
        rest = text
        while too_long and rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
        text = text[:1024] if too_long else text.strip()
        if text:
            yield Line(number, text, too_long)


# ---- output ----


class Output:
    """A local file, ``-`` for standard output, or an http(s) URL to PUT to. Each line is out of this process at once.

    Args:
        name: where to.
        resume: keep what a local file has, but for a torn line at its end, and tell what it has.
        tmp_dir: where the file for an upload grows; the system's directory for such files when not given.

    Raises:
        ConfigError: there is nothing to resume from.
        OSError: it cannot be opened.
    """

    def __init__(self, name: str, *, resume: bool, tmp_dir: str | None) -> None:
        self.name = name
        self.done: set[str] = set()
        """Ids of lines answered by an earlier run."""
        if resume and (name == "-" or is_url(name) or (Path(name).exists() and not Path(name).is_file())):
            raise ConfigError(f"--resume: {name} keeps nothing of an earlier run; write to a file.")
        self._upload: str | None = None
        if name == "-":
            self._fd = os.dup(1)
            os.dup2(2, 1)  # what else this process and the engine's print there goes to standard error from now on
        elif is_url(name):
            self._fd, self._upload = tempfile.mkstemp(prefix="tmp_batch_output_", suffix=".jsonl", dir=tmp_dir)
        else:
            self._fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._claim()
                if resume:
                    self._read_done()
                elif stat.S_ISREG(os.fstat(self._fd).st_mode):
                    os.truncate(self._fd, 0)
            except BaseException:
                os.close(self._fd)
                raise

    @property
    def left(self) -> str:
        """Where the answers of a run are that did not come to its end, and what can be done with them."""
        if self._upload is not None:
            return f"Nothing was sent to {self.name}; what is answered is in {self._upload}."
        if self.name == "-":
            return "What is answered was printed."
        return f"What is answered is in {self.name}; --resume goes on from there."

    def write(self, line: bytes) -> None:
        """Hand a line to the system."""
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]

    def finish(self) -> None:
        """Send what is to be sent.

        Raises:
            OSError: the upload failed, five times; the file with the answers stays, and the message names it.
        """
        path = self._upload
        if path is None:
            return
        for attempt in range(1, UPLOADS + 1):
            try:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
                    httpx.put(self.name, content=file, headers=headers, timeout=600).raise_for_status()
                os.unlink(path)
                return
            except httpx.HTTPError as error:
                logger.error("Upload %d of %d to %s failed: %s", attempt, UPLOADS, self.name, error)
                if attempt == UPLOADS:
                    raise OSError(f"{self.name}: the upload failed ({error}); the answers are in {path}.") from error
                time.sleep(UPLOAD_PAUSE_S)  # between attempts on someone else's server

    def close(self) -> None:
        os.close(self._fd)

    def _claim(self) -> None:
        """Two runs into one file would answer lines twice."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--output-file {self.name}: another batch is writing to it.") from error

    def _read_done(self) -> None:
        end = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                try:
                    self.done.add(json.loads(text)["id"])
                except (ValueError, TypeError, KeyError) as error:
                    raise ConfigError(f"--resume: line {number} of {self.name} is no answer of a batch.") from error
                end += len(text)
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
