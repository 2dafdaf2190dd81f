"""One line of a batch: what it asks for, and the line that answers it. Requests run through the server's own app."""

import asyncio
import re
import secrets
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from vllm_clone.entrypoints.serve.errors import SCHEMA_TYPE, error_body

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
"""What a line may ask for."""
LATER = {
    "/embeddings": "pooling models are not implemented yet",
    "/score": "pooling models are not implemented yet",
    "/rerank": "pooling models are not implemented yet",
    "/audio/transcriptions": "audio models are not implemented yet",
    "/audio/translations": "audio models are not implemented yet",
}
"""End of a URL that vLLM knows → why its lines are refused."""
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
STREAMED = "A line of a batch cannot be streamed; leave stream out."


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streamed(msgspec.Struct):
    stream: Any = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw | None


class _Result(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response
    error: Any


class Outcome(msgspec.Struct):
    """A line's result."""

    line: bytes
    status: int
    prompt_tokens: int = 0
    completion_tokens: int = 0


async def run_line(app: ASGIApp, id: str, line: bytes, max_bytes: int) -> Outcome:
    """Run one line; whatever it holds, it gets a result."""
    if len(line) > max_bytes:
        return _failed(id, None, 400, error_body(f"The line exceeds {max_bytes} bytes.", SCHEMA_TYPE, None, 400))
    try:
        asked = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The line is no request: {error}"
        return _failed(id, _custom_id(line), 400, error_body(message, SCHEMA_TYPE, None, 400))
    if asked.url not in PATHS:
        return _failed(id, asked.custom_id, 400, _unsupported(asked.url))
    try:
        streamed = msgspec.json.decode(asked.body, type=_Streamed).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        streamed = None  # the application says what is wrong with it
    if streamed is True:
        return _failed(id, asked.custom_id, 400, STREAMED)
    status, body, is_stream = await call(app, asked.url, bytes(asked.body))
    if is_stream:
        return _failed(id, asked.custom_id, 400, STREAMED)
    if status != 200:
        return _failed(id, asked.custom_id, status, msgspec.json.decode(body))
    usage = msgspec.json.decode(body, type=_Answer).usage or _Usage()
    response = _Response(200, _request_id(), msgspec.Raw(body))
    encoded = msgspec.json.encode(_Result(id, asked.custom_id, response, None))
    return Outcome(encoded, 200, usage.prompt_tokens, usage.completion_tokens or 0)


def _failed(id: str, custom_id: str | None, status: int, error: Any) -> Outcome:
    return Outcome(msgspec.json.encode(_Result(id, custom_id, _Response(status, _request_id(), None), error)), status)


def _request_id() -> str:
    return f"vllm-batch-{secrets.token_hex(8)}"


def _custom_id(line: bytes) -> str | None:
    """The name of a line that is otherwise wrong, even as JSON, when it can be read."""
    match = _CUSTOM_ID.search(line)
    try:
        return None if match is None else msgspec.json.decode(match[1], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _unsupported(url: str) -> str:
    reason = next((why for end, why in LATER.items() if url.endswith(end)), "it is no endpoint of batches")
    return f"{url}: {reason}; supported are {', '.join(PATHS)}."


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes, bool]:
    """POST to an application in this process: status, body, and whether it answered with a stream."""
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, pieces, is_stream = 500, [], False

    async def receive() -> Message:
        if not request:
            await asyncio.Event().wait()  # this client never hangs up
        return request.pop()

    async def send(message: Message) -> None:
        nonlocal status, is_stream
        if message["type"] == "http.response.start":
            status = message["status"]
            is_stream = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in message["headers"])
        elif not is_stream:
            pieces.append(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("batch", 0), "server": ("batch", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return status, b"".join(pieces), is_stream
