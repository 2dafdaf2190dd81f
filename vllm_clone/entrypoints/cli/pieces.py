"""JSON flags in pieces: ``--flag.a.b 1``, ``--flag.list+ x,y`` and ``-cc.mode=0`` are laid over the flag's value."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_clone.config.flags import FlagSpec, human_int


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece as typed."""

    typed: str
    """The name with its keys, for messages."""
    spec: FlagSpec
    keys: tuple[str, ...]
    """Path inside the flag's object; empty for a list flag that grows."""
    value: Any
    grows: bool
    """Whether the values are added to a list."""


def split(argv: Sequence[str], find: Callable[[str], FlagSpec | None]) -> tuple[list[str], list[Piece]]:
    """Words without pieces, and the pieces. ``find`` gives the JSON or list flag of a name or alias.

    Raises:
        ValueError: a piece without a value; the message is for the user.
    """
    rest: list[str] = []
    pieces: list[Piece] = []
    words = iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        path = name.removesuffix("+")
        head, *keys = path.split(".")
        spec = find(head) if word.startswith("-") and (keys or path != name) else None
        if word == "--":
            rest += [word, *words]
        elif spec is None:
            rest.append(word)
        else:
            pieces.append(_piece(spec, name, tuple(keys), text if equals else None, words))
    return rest, pieces


def _piece(spec: FlagSpec, typed: str, keys: tuple[str, ...], text: str | None, words: Iterator[str]) -> Piece:
    if keys and spec.kind != "json":
        raise ValueError(f"{typed}: {spec.name} takes a list, no JSON object; leave the dot out")
    if not all(keys):
        raise ValueError(f"{typed}: a key is missing around a dot")
    if text is None:
        text = next(words, None)
    if text is None:
        raise ValueError(f"{typed}: expected one argument")
    if typed.endswith("+"):
        return Piece(typed, spec, keys, text.split(","), True)
    return Piece(typed, spec, keys, _read(text), False)


def _read(text: str) -> Any:
    """JSON, else a number such as 4k, else the text."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        return human_int(text)
    except ValueError:
        return text


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def lay_over(value: Any, piece: Piece) -> Any:
    """The flag's value with one piece laid over it; ``value`` is changed where it can be.

    Raises:
        ValueError: the value has something else than an object or a list where the piece needs one.
    """
    if not piece.keys:
        return [*(value or []), *piece.value]
    whole = {} if value is None else value
    inner = whole
    for key in piece.keys[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{piece.typed}: {key} has the value {json.dumps(inner)} and so no keys")
    last = piece.keys[-1]
    old = inner.get(last)
    if piece.grows:
        if old is not None and not isinstance(old, list):
            raise ValueError(f"{piece.typed}: {last} has the value {json.dumps(old)}, no list to add to")
        inner[last] = [*(old or []), *piece.value]
    elif isinstance(old, dict) and isinstance(piece.value, dict):
        old.update(piece.value)
    else:
        inner[last] = piece.value
    return whole
