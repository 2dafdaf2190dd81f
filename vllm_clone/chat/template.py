"""Chat templates: compiling, rendering, and what a template expects of a message's content."""

import time
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from vllm_clone.chat.sandbox import MAX_CHARS, MAX_SECONDS, TemplateEnvironment, deadline
from vllm_clone.errors import RequestError


@lru_cache(maxsize=1)
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"The chat template has a syntax error in line {error.lineno}: {error.message}") from error
    except Exception as error:  # compiling may also fail on nesting, unknown filters or sheer size
        raise RequestError(f"The chat template cannot be compiled: {error}") from error


def render(source: str, variables: dict[str, Any]) -> str:
    """Render a template.

    Raises:
        RequestError: the template is wrong, refuses the messages, or goes beyond the bounds of size and time.
    """
    template = _compile(source)
    pieces: list[str] = []
    size = 0
    token = deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARS:
                raise RequestError(f"The chat template produced more than {MAX_CHARS} characters.")
    except RequestError:
        raise
    except Exception as error:  # a template may run into any error; it is the request's, never the server's
        raise RequestError(f"The chat template cannot render these messages: {error}") from error
    finally:
        deadline.reset(token)
    return "".join(pieces)


@lru_cache(maxsize=32)
def wants_content_parts(source: str) -> bool:
    """Whether a template loops over a message's content, so that it must get a list of parts, not one string."""
    try:
        tree = _environment().parse(source)
    except Exception:  # rendering will tell what is wrong with the template
        return False
    names = {
        a.target.name for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name) and _is_content(a.node)
    }
    iterated = [_unfiltered(loop.iter) for loop in tree.find_all(nodes.For)]
    return any(_is_content(i) or (isinstance(i, nodes.Name) and i.name in names) for i in iterated)


def _unfiltered(node: nodes.Node | None) -> nodes.Node | None:
    """``x`` of ``x | selectattr(…) | list``."""
    while isinstance(node, nodes.Filter):
        node = node.node
    return node


def _is_content(node: nodes.Node | None) -> bool:
    """``x['content']`` or ``x.content``."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
