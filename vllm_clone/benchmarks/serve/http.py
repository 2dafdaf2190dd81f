"""A thin HTTP/1.1 client: connections that stay open, bodies handed over as they arrive, and nothing else.

One read of a socket costs one call of the C parser and one call of the body's reader, so that a load generator on the
machine under test takes little of it.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

from vllm_clone.errors import ConfigError

REQUEST_SECONDS = 6 * 3600.0
"""Longest a request may take."""

BodyReader = Callable[[int, bytes, float], None]
"""Called with the HTTP status, a piece of the body, and when it arrived on :func:`time.perf_counter`'s clock."""


class HTTPError(Exception):
    """No whole answer came: no connection, a broken one, a malformed answer, or none in time."""


class _Connection(asyncio.Protocol):
    """One connection, which carries one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.is_fresh = True
        self.reason = b""
        self._stays_open = False
        self._arrived = 0.0
        self._done: asyncio.Future[None] | None = None
        self._on_body: BodyReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    async def ask(self, request: bytes, on_body: BodyReader | None) -> int:
        """Send a whole request and read its answer; the HTTP status."""
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._has_length = self._stays_open = False
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._done
        finally:
            self._done = None
        return self._status

    @property
    def can_be_used_again(self) -> bool:
        return self._stays_open and not self.transport.is_closing()

    @property
    def has_begun_to_answer(self) -> bool:
        return self._status != 0

    def data_received(self, data: bytes) -> None:
        self._arrived = time.perf_counter()
        if self._done is None:  # nobody asked
            self.transport.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"malformed answer: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and self._status and not self._has_length:
            self._finish()  # an answer without a length ends with its connection
        else:
            self._fail(f"the connection was lost{f': {error}' if error else ''}")

    def on_status(self, reason: bytes) -> None:
        self.reason = reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._on_body is not None:
            self._on_body(self._status, data, self._arrived)

    def on_message_complete(self) -> None:
        self._stays_open = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HTTPError(message))
        self.transport.close()


class Client:
    """Requests to one server.

    Args:
        base_url: ``http://host:port`` or ``https://…``, with a path in front of every request's or without.
        headers: sent with every request.
        insecure: accept any TLS certificate.

    Raises:
        ConfigError: no such URL.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] = {}, insecure: bool = False) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url {base_url}: must be http://HOST[:PORT] or https://HOST[:PORT].")
        self.base_url = base_url.rstrip("/")
        self._host, self._port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._prefix = url.path.rstrip("/")
        self._tls: ssl.SSLContext | None = None
        if url.scheme == "https":
            self._tls = ssl.create_default_context()
            if insecure:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE
        self._headers = {"Host": url.netloc.rpartition("@")[2], "Accept": "*/*", **headers}
        self._idle: list[_Connection] = []

    async def stream(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], on_body: BodyReader | None
    ) -> tuple[int, str]:
        """Send a request and hand over the body of its answer as it arrives.

        Returns:
            The HTTP status and its reason phrase, once the answer is whole.

        Raises:
            HTTPError: there is no whole answer.
        """
        request = self._head(method, path, body, headers) + body
        while True:
            connection = self._take_idle() or await self._connect()
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    status = await connection.ask(request, on_body)
            except TimeoutError:
                raise HTTPError(f"no whole answer in {REQUEST_SECONDS:.0f} s") from None
            except HTTPError:
                if connection.is_fresh or connection.has_begun_to_answer:
                    raise
                continue  # the server closed an idle connection just as it was used again
            finally:
                if not connection.can_be_used_again:
                    connection.transport.close()
            connection.is_fresh = False
            if connection.can_be_used_again:
                self._idle.append(connection)
            return status, connection.reason.decode("latin-1")

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and whole body of an answer. Raises HTTPError as :meth:`stream` does."""
        pieces: list[bytes] = []
        status, _ = await self.stream(method, path, body, {}, lambda _, piece, __: pieces.append(piece))
        return status, b"".join(pieces)

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()

    def _head(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {self._prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**self._headers, **headers}.items()]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        elif method == "POST":
            lines.append("Content-Length: 0")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise HTTPError(f"cannot connect to {self._host}:{self._port}: {error}") from error
        return connection
