"""Errors that belong to one request or end the engine.

Everything one request can cause is a :class:`RequestError`; the HTTP layer maps its ``kind`` to a
status code in one table. Anything else that leaves the engine loop is an engine fault.
"""

from typing import Any, Literal

ErrorKind = Literal["invalid", "not_found", "unprocessable", "forbidden", "not_implemented", "overloaded", "internal"]


class RequestError(ValueError):
    """One request cannot be served; every other request goes on.

    Args:
        message: what is wrong and what would be right, in one or two sentences.
        kind: decides the HTTP status (invalid 400, forbidden 403, not_found 404, unprocessable 422,
            internal 500, not_implemented 501, overloaded 503).
        param: bare name of the request field at fault, or None.
        value: the offending value when it is short enough to show.
    """

    def __init__(
        self, message: str, *, kind: ErrorKind = "invalid", param: str | None = None, value: Any = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind: ErrorKind = kind
        self.param = param
        self.value = value


class EngineDeadError(RuntimeError):
    """The engine process is gone or its loop failed; nothing more can be generated."""

    def __init__(self, message: str = "The engine has stopped; see the server log for the cause.") -> None:
        super().__init__(message)


class ConfigError(ValueError):
    """A flag or configuration value cannot work; raised before any weight is loaded.

    The message is one line: which flag, which value, which rule, what to do instead.
    """


class ModelLoadError(RuntimeError):
    """A checkpoint cannot be loaded; the one-line message names file, tensor, expected and found."""
