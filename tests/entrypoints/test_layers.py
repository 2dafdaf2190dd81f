"""The ASGI layers, each around a small application of its own."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from tests.entrypoints.http_server import HTTPServer, logged
from vllm_clone.entrypoints.serve.middleware import Authentication, BodyLimit, LastResort, RequestIdHeader
from vllm_clone.errors import RequestError


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{len(await request.body())} bytes")


async def failing(request: Request) -> PlainTextResponse:
    raise RequestError("no", kind="forbidden") if request.query_params else KeyError("a secret")


async def failing_late(request: Request) -> StreamingResponse:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"begun"
        raise KeyError("too late")

    return StreamingResponse(pieces())


ROUTES = [
    Route("/{path:path}/echo", echo, methods=["GET", "POST", "OPTIONS"]),
    Route("/fail", failing),
    Route("/late", failing_late),
]


def app() -> Starlette:
    return Starlette(routes=ROUTES)


def bare() -> Router:
    """An application whose errors nobody handles."""
    return Router(routes=ROUTES)


def ask(layer: ASGIApp, method: str, path: str, **how: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(layer)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **how)

    return asyncio.run(send())


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


BODIES: dict[str, Callable[[int], Any]] = {
    "declared": lambda size: b"x" * size,
    "chunked": lambda size: pieces(b"x" * (size - 1), b"x"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_up_to_the_limit_is_read_and_a_longer_one_is_413(kind: str) -> None:
    limited = BodyLimit(app(), limit=100)
    fits = ask(limited, "POST", "/v1/echo", content=BODIES[kind](100))
    assert (fits.status_code, fits.text) == (200, "100 bytes")
    long = ask(limited, "POST", "/v1/echo", content=BODIES[kind](101))
    assert long.status_code == 413
    assert "100" in long.text
    assert long.headers["connection"] == "close"


def test_the_server_refuses_a_huge_body_before_it_comes(server: HTTPServer) -> None:
    with socket.create_connection((server.client.base_url.host, server.client.base_url.port or 0), 20) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {300 << 20}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_an_unforeseen_error_is_logged_and_answered_without_details() -> None:
    with logged("vllm_clone.entrypoints.serve.errors") as messages:
        answer = ask(LastResort(bare()), "GET", "/fail")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in answer.text
    assert len(messages) == 1


def test_a_requests_own_error_keeps_its_status() -> None:
    assert ask(LastResort(bare()), "GET", "/fail?x=1").status_code == 403


def test_an_error_after_the_answer_began_ends_the_connection() -> None:
    with pytest.raises(KeyError, match="too late"):
        ask(LastResort(bare()), "GET", "/late")


def test_an_unforeseen_error_leaves_the_connection_open(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object, **kwargs: object) -> None:
        raise KeyError

    with monkeypatch.context() as patch, httpx.Client(base_url=server.url) as client:
        patch.setattr(server.engine, "prepare", fail)
        for _ in range(3):
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 500
        (connection,) = client._transport._pool.connections  # type: ignore[attr-defined]
        assert "Request Count: 3" in repr(connection)


KEYS = ["first", "zwö"]


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer first", 200), ("bearer first", 200), ("BEARER  first ", 200), ("Bearer zwö", 200),
        ("Bearer second", 401), ("Bearer", 401), ("Bearer ", 401), ("first", 401), ("Basic first", 401),
        ("Bearer firs", 401), ("Bearer first2", 401), ("", 401),
    ],
)  # fmt: skip
def test_keys(authorization: str, status: int) -> None:
    guarded = Authentication(app(), KEYS)
    answer = ask(guarded, "GET", "/v1/echo", headers={"Authorization": authorization.encode()})
    assert answer.status_code == status
    if status == 401:
        assert answer.json() == {"error": "Unauthorized"}


@pytest.mark.parametrize(
    ("path", "open_"),
    [
        ("/v1/echo", False), ("/v1/x/echo", False), ("/v2/echo", False), ("/inference/echo", False),
        ("/cohere/echo", False), ("/%761/echo", False), ("/v3/echo", True), ("/x/v1/echo", True),
    ],
)  # fmt: skip
def test_guarded_paths(path: str, open_: bool) -> None:
    assert ask(Authentication(app(), KEYS), "GET", path).status_code == (200 if open_ else 401)


def test_preflights_need_no_key() -> None:
    assert ask(Authentication(app(), KEYS), "OPTIONS", "/v1/echo").status_code == 200


def test_request_ids_are_echoed_or_made() -> None:
    layer = RequestIdHeader(app())
    assert ask(layer, "GET", "/v1/echo", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    made = [ask(layer, "GET", "/v1/echo").headers["x-request-id"] for _ in range(2)]
    assert [len(m) for m in made] == [32, 32]
    assert made[0] != made[1]
