"""The Jinja environment of chat templates: what transformers offers, with bounds on time and size.

A template comes with a model or, when the operator allows it, with a request. Jinja's sandbox keeps it away from
Python; the bounds here keep it from holding a thread or the memory of the server.
"""

import datetime
import json
import re
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.defaults import DEFAULT_FILTERS
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 1 << 26
"""Longest text a template may make, in characters."""
MAX_ITEMS = 1 << 20
"""Longest list that an operator may make."""
MAX_SECONDS = 10.0
MAX_PADDING = 10_000
"""Largest width, count or indentation a template may ask for."""
MAX_POWER_BITS = 4096

deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))
"""``time.monotonic()`` at which the rendering in progress must end."""

_PADDING_METHODS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs"])
_PADDING_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "round", "tojson")
_WIDE_FORMAT = re.compile(r"\d{5,}|\*")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template goes beyond its bounds."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Checks the deadline on every turn of a loop and call of a macro, and the size of what operators make."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        for name in _PADDING_FILTERS:
            self.filters[name] = _bounded(_tojson if name == "tojson" else DEFAULT_FILTERS[name])
        self.filters["join"] = _join
        self.filters["replace"] = _replace
        self.filters["format"] = _format
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def check_time(self) -> str:
        if time.monotonic() > deadline.get():
            raise TemplateLimitError(f"it ran for more than {MAX_SECONDS:g} seconds")
        return ""

    def joined(self, *values: Any) -> str:
        """``a ~ b``."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, type(left)):
            _check_size(len(left) + len(right), left)
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _check_size(len(sequence) * count, sequence)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_POWER_BITS:
                raise TemplateLimitError("it computes too large a number")
        elif operator == "%" and isinstance(left, str):
            return _format(left, *(right if isinstance(right, tuple) else (right,)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text, name = getattr(getattr(obj, "__wrapped__", obj), "__self__", None), getattr(obj, "__name__", None)
        if isinstance(text, str):
            if name in _PADDING_METHODS:
                _check_padding(args)
            elif name == "replace" and args and "" not in args[:2] and len(args) > 1:
                return _replace(text, *args)
            elif name == "join" and args:
                return _join(args[0], text)
            elif name == "format" and _WIDE_FORMAT.search(text):
                raise TemplateLimitError("a format asks for too wide a field")
        return super().call(context, obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bodies: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in bodies:
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(check).set_lineno(node.lineno))
        _call_instead_of_concat(tree)
        return tree.set_environment(self)  # type: ignore[return-value]


class _Namespace(Namespace):
    """Holds a template's variables, none of which may look like Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"the name {name!r} begins with an underscore")
        super().__setitem__(name, value)


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; here it is only text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _call_instead_of_concat(node: nodes.Node) -> None:
    """Turn each ``a ~ b`` below ``node`` into a call of :meth:`TemplateEnvironment.joined`."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_replaced(item) if isinstance(item, nodes.Concat) else item for item in value]
        elif isinstance(value, nodes.Concat):
            setattr(node, field, _replaced(value))
    for child in node.iter_child_nodes():
        _call_instead_of_concat(child)


def _replaced(concat: nodes.Concat) -> nodes.Call:
    function = nodes.EnvironmentAttribute("joined")
    call = nodes.Call(function, concat.nodes, [], None, None)
    return call.set_lineno(concat.lineno)  # type: ignore[return-value]


def _check_size(size: int, kind: Any = "") -> None:
    limit, unit = (MAX_CHARS, "characters") if isinstance(kind, str) else (MAX_ITEMS, "items")
    if size > limit:
        raise TemplateLimitError(f"it makes more than {limit} {unit}")


def _check_padding(values: Iterable[Any]) -> None:
    if any(isinstance(v, int) and abs(v) > MAX_PADDING for v in values):
        raise TemplateLimitError(f"it asks for a width or count above {MAX_PADDING}")


def _bounded(function: Any) -> Any:
    """A filter whose numeric arguments are bounded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _check_padding([*args[1:], *kwargs.values()])
        return function(*args, **kwargs)

    # Jinja tells by these attributes what a filter wants before its value.
    call.__dict__.update(function.__dict__)
    return call


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    if attribute is not None:
        items = [item[attribute] if isinstance(item, Mapping) else getattr(item, str(attribute), "") for item in items]
    texts = [str(item) for item in items]
    _check_size(sum(map(len, texts)) + len(d) * len(texts))
    return str(d).join(texts)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    found = text.count(old) if count is None or count < 0 else min(text.count(old), count)
    _check_size(len(text) + found * (len(new) - len(old)))
    return text.replace(old, new, -1 if count is None else count)


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    if _WIDE_FORMAT.search(str(text)):
        raise TemplateLimitError("a format asks for too wide a field")
    return str(text) % (kwargs or args)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, leaves HTML characters and other alphabets as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(fmt: str) -> str:
    return datetime.datetime.now().strftime(fmt)
