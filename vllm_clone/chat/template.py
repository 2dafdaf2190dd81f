"""Chat templates: sandboxed Jinja with bounds on what a template may produce."""

import datetime
import json
import time
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm_clone.errors import RequestError

MAX_PROMPT_CHARS = 1 << 26
MAX_SECONDS = 10.0


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; here it is only text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _strftime_now(fmt: str) -> str:
    return datetime.datetime.now().strftime(fmt)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], keep_trailing_newline=False
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"The chat template has a syntax error in line {error.lineno}: {error.message}") from error


def render(source: str, variables: dict[str, Any]) -> str:
    """Render a template.

    Raises:
        RequestError: the template is wrong, refuses the messages, or goes beyond the bounds of size and time.
    """
    template = _compile(source)
    pieces: list[str] = []
    size, deadline = 0, time.monotonic() + MAX_SECONDS
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_PROMPT_CHARS:
                raise RequestError(f"The chat template produced more than {MAX_PROMPT_CHARS} characters.")
            if time.monotonic() > deadline:
                raise RequestError(f"The chat template ran for more than {MAX_SECONDS:g} seconds.")
    except RequestError:
        raise
    except Exception as error:  # a template may run into any error; it is the request's, never the server's
        raise RequestError(f"The chat template cannot render these messages: {error}") from error
    return "".join(pieces)


@lru_cache(maxsize=32)
def wants_content_parts(source: str) -> bool:
    """Whether a template loops over a message's content, so that it must get a list of parts, not one string."""
    try:
        tree = _environment().parse(source)
    except jinja2.TemplateSyntaxError:
        return False
    names = {
        a.target.name for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name) and _is_content(a.node)
    }
    return any(
        _is_content(f.iter) or (isinstance(f.iter, nodes.Name) and f.iter.name in names)
        for f in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    """``x['content']`` or ``x.content``."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
