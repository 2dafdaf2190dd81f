"""The one table from exceptions to HTTP answers."""

import re
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from vllm_clone.errors import EngineDeadError, ErrorKind, RequestError
from vllm_clone.logger import init_logger

logger = init_logger(__name__)

KINDS: dict[ErrorKind, tuple[int, str]] = {
    "invalid": (400, "BadRequestError"),
    "forbidden": (403, "PermissionDeniedError"),
    "not_found": (404, "NotFoundError"),
    "unprocessable": (422, "UnprocessableEntityError"),
    "internal": (500, "InternalServerError"),
    "not_implemented": (501, "NotImplementedError"),
    "overloaded": (503, "Service Unavailable"),
}
"""Error kind → HTTP status and OpenAI error type."""

SCHEMA_TYPE = "Bad Request"
MAX_SHOWN_ERRORS, MAX_INPUT_CHARS, MAX_LINE_CHARS = 10, 200, 1000
MAX_MESSAGE_CHARS = 2000
"""An error's message repeats what the client sent, and that may be megabytes."""
_UNION_TAG = re.compile(
    r"str|int|float|bool|bytes|none|nullable|(list|dict|tuple|union|constrained|function|lax).*[\[\-].*|[A-Z]\w*Request"
)
_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.\-+]+/)+[\w.\-+]+")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class ContentTypeError(Exception):
    """The body is not declared as JSON."""


def error_body(message: str, type_: str, param: str | None, code: int) -> dict[str, Any]:
    """The OpenAI error object. Paths and addresses never leave the server."""
    message = _ADDRESS.sub("<address>", _PATH.sub("<path>", message))
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def request_error_body(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Status and body of a request's own error."""
    code, type_ = KINDS[error.kind]
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    if error.param is not None:
        shown = "" if error.value is None else f", value={str(error.value)[:MAX_INPUT_CHARS]}"
        message += f" (parameter={error.param}{shown})"
    return code, error_body(message, type_, error.param, code)


def body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for any exception; what is no request's own error is logged and answered with 500."""
    if isinstance(error, RequestError):
        return request_error_body(error)
    if isinstance(error, EngineDeadError):
        return 500, error_body(str(error), "InternalServerError", None, 500)
    logger.error("A request failed unexpectedly", exc_info=error)
    return 500, error_body("The server failed to handle this request; see its log.", "InternalServerError", None, 500)


def answer(error: Exception) -> JSONResponse:
    """The HTTP answer to an exception."""
    code, body = body_of(error)
    headers = {"Retry-After": "1"} if code == 503 else None
    return JSONResponse(body, code, headers)


async def on_request_error(request: Request, error: Exception) -> JSONResponse:
    if getattr(request.app.state, "log_error_stack", False):
        logger.error("Request to %s failed", request.url.path, exc_info=error)
    return answer(error)


async def on_content_type_error(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body("The Content-Type must be application/json.", SCHEMA_TYPE, None, 400), 400)


async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
    """Schema errors: 400 with the path of the first one. Our own checks inside validators keep their own form."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    for entry in errors:
        own = entry.get("ctx", {}).get("error")
        if isinstance(own, RequestError):
            return answer(own)
    shown = [_described(e) for e in errors[:MAX_SHOWN_ERRORS]]
    rest = len(errors) - len(shown)
    lines = [f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}:", *shown]
    if rest > 0:
        lines.append(f"… and {rest} more.")
    return JSONResponse(error_body("\n".join(lines), SCHEMA_TYPE, location(errors[0]["loc"]), 400), 400)


def location(parts: Sequence[Any]) -> str:
    """Dotted path of a schema error without the names of plain union branches."""
    return ".".join(str(p) for p in parts if isinstance(p, int) or not _UNION_TAG.fullmatch(str(p)))


def _described(entry: dict[str, Any]) -> str:
    value = entry.get("input")
    if isinstance(value, str):
        value = value if len(value) <= MAX_INPUT_CHARS else value[:MAX_INPUT_CHARS] + "…"
    elif isinstance(value, dict | list):
        value = f"<{type(value).__name__} of {len(value)}>"
    record = {"type": entry["type"], "loc": location(entry["loc"]), "msg": entry["msg"], "input": value}
    return ("  " + str(record))[:MAX_LINE_CHARS]
