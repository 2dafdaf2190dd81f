"""ASGI layers around every route: keys, request ids, metrics, limits, last errors.

Plain ASGI, so that streams pass untouched.
"""

import hmac
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_clone.entrypoints.serve.errors import answer
from vllm_clone.metrics.prometheus import HTTPMetrics

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
UNCOUNTED = frozenset(["/metrics", "/health", "/load", "/ping", "/version", "/server_info"])
MAX_BODY_BYTES = 256 << 20
"""A body is held in memory before anything can be said about it; no valid one comes near this."""


class Authentication:
    """401 for guarded paths without one of the keys; compared in constant time, before routing."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and self._is_guarded(scope):
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            token = given.strip().encode("latin-1")  # the bytes as they were sent
            # Every key is compared whatever the others say, so that timing tells nothing.
            valid = [hmac.compare_digest(token, key) for key in self._keys]
            if scheme.lower() != "bearer" or not any(valid):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    @staticmethod
    def _is_guarded(scope: Scope) -> bool:
        path, root = scope["path"], scope.get("root_path", "")
        if root and path.startswith(root + "/"):  # as the router does it, or a request could get past us
            path = path[len(root) :]
        return bool(path.startswith(GUARDED))


class RequestIdHeader:
    """Every answer carries the request's X-Request-Id, or one of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id") or secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class RequestMetrics:
    """Feeds the http_* series."""

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") in UNCOUNTED or scope["path"].startswith("/metrics"):
            await self._app(scope, receive, send)
            return
        begun, status, size = time.perf_counter(), 500, 0

        async def watch(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                size = int(Headers(raw=message["headers"]).get("content-length", 0))
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            route = scope.get("route")
            length = Headers(scope=scope).get("content-length", "0")
            self._metrics.record(
                getattr(route, "path", "none"),
                scope["method"],
                status,
                int(length) if length.isdecimal() else 0,
                size,
                time.perf_counter() - begun,
            )


class BodyLimit:
    """413 for a body of more than ``limit`` bytes, as soon as that is known."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"The body must be at most {self._limit} bytes."
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit:
            await JSONResponse({"detail": message}, 413, {"Connection": "close"})(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            part = await receive()
            size += len(part.get("body", b""))
            if size > self._limit:
                raise HTTPException(413, message, {"Connection": "close"})
            return part

        await self._app(scope, counted, send)


class LastResort:
    """Answers what no handler foresaw with 500, here and not further out, where it would cost the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await answer(error)(scope, receive, send)
