"""How a dataclass field becomes a command-line flag: type, default, help and choices live in one place.

A field made by :func:`flag` is a flag named after it; a field made by :func:`resolved` is filled in when the
configuration is resolved. The parser, ``--help``, ``EngineArgs`` and the docs are derived from the fields.
"""

import dataclasses
import re
import types
import typing
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec

DECIMAL_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_SUFFIX = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LIMIT = 2**63
"""Numbers are below this, either side of zero."""


def human_int(text: str) -> int:
    """``25.6k`` → 25600, ``2M`` → 2097152: k m g t are powers of 1000, K M G T whole powers of 1024.

    Raises:
        ValueError: not a whole number with an optional suffix.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip().replace("_", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a number such as 4096, 4k, 4K, 1.5m or 2G")
    number, suffix = match.groups()
    if suffix in BINARY_SUFFIX and "." in number:
        raise ValueError(f"{text!r}: {suffix} is a power of 1024 and takes whole numbers; use {suffix.lower()}")
    unit = BINARY_SUFFIX.get(suffix) or DECIMAL_SUFFIX.get(suffix, 1)
    value = Decimal(number) * unit  # not float: 1.001k is 1001
    if abs(value) >= LIMIT:
        raise ValueError("larger than 64 bits hold")
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def whole_number(text: str) -> int:
    """An integer in plain digits.

    Raises:
        ValueError: anything else, or more than 64 bits hold.
    """
    try:
        value = int(text)
    except ValueError as error:
        raise ValueError("not a whole number") from error
    if abs(value) >= LIMIT:
        raise ValueError("larger than 64 bits hold")
    return value


def int_or_auto(text: str) -> int:
    """A human integer; ``auto`` and ``-1`` both give -1."""
    return -1 if text.strip().lower() == "auto" else human_int(text)


HumanInt = Annotated[int, human_int]
IntOrAuto = Annotated[int, int_or_auto]


def flag(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    one_way: bool = False,
    nullable: bool = False,
    secret: bool = False,
) -> Any:
    """A configuration field that is a flag.

    Args:
        default: value when the flag is not given; None means "settled later", whatever the type.
        help: one sentence, shown by ``--help``.
        aliases: further names, such as ``-tp``.
        one_way: a boolean without a ``--no-`` form.
        nullable: ``""`` and ``None`` on the command line mean None.
        secret: the value is never printed.
    """
    metadata = {"help": help, "aliases": aliases, "one_way": one_way, "nullable": nullable, "secret": secret}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def resolved(default: Any) -> Any:
    """A field that resolution fills in; not a flag."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default))
    return dataclasses.field(default=default)


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag, read off its field."""

    group: str
    field: str
    type: Any
    """The field's annotation."""
    kind: Literal["bool", "int", "float", "str", "json", "list"]
    parse: Any
    """Text → value, for the kinds that take one text."""
    default: Any
    help: str
    choices: tuple[Any, ...] | None
    aliases: tuple[str, ...]
    one_way: bool
    nullable: bool
    secret: bool

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def type_name(self) -> str:
        return {"json": "JSON", "list": "list"}.get(self.kind, self.kind)

    def check(self, value: Any, *, from_text: bool = False) -> Any:
        """The value as the field's type has it; pieces of text become numbers when ``from_text``.

        Raises:
            ValueError: it is of another type.
        """
        return msgspec.convert(value, self.type, strict=not from_text)


def flags_of(config_class: type) -> list[FlagSpec]:
    """The flags of one config group, in declaration order."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    return [_spec(config_class.__name__, f, hints[f.name]) for f in dataclasses.fields(config_class) if f.metadata]


def _spec(group: str, field: "dataclasses.Field[Any]", hint: Any) -> FlagSpec:
    whole = hint
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    parse: Any = None
    if typing.get_origin(hint) is Annotated:
        hint, parse = typing.get_args(hint)
    choices = None
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        hint = type(choices[0])
    origin = typing.get_origin(hint) or hint
    kind: Any = {bool: "bool", int: "int", float: "float", str: "str", dict: "json", list: "list"}[origin]
    if parse is None:
        parse = whole_number if origin is int else origin
    made = field.default_factory
    default = field.default if made is dataclasses.MISSING else made()
    return FlagSpec(group, field.name, whole, kind, parse, default, choices=choices, **field.metadata)
