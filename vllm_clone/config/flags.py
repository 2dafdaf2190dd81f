"""How a dataclass field becomes a command-line flag: type, default, help and choices live in one place.

A field made by :func:`flag` is a flag named after it; a field made by :func:`resolved` is filled in when the
configuration is resolved. The parser, ``--help``, ``EngineArgs`` and the docs are derived from the fields.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec

from vllm_clone.config.support import WORKS, Level, Support

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


def lower(text: str) -> str:
    """Names that are written in small letters."""
    return text.strip().lower()


def upper(text: str) -> str:
    """Names that are written in capitals; ``auto`` stays small."""
    text = text.strip()
    return "auto" if text.lower() == "auto" else text.upper()


def kernel_name(text: str) -> str:
    """Names of kernels: small letters, ``_`` for ``-``."""
    return lower(text).replace("-", "_")


def level_name(text: str) -> str:
    """``2`` or ``O2``."""
    text = text.strip().upper()
    return f"O{text}" if text.isdecimal() else text


MODES = {"NONE": 0, "STOCK_TORCH_COMPILE": 1, "DYNAMO_TRACE_ONCE": 2, "VLLM_COMPILE": 3}


def compilation_mode(text: str) -> int:
    """A mode by its number or its name.

    Raises:
        ValueError: neither.
    """
    name = text.strip().upper()
    return MODES[name] if name in MODES else whole_number(text)


def str_or_json(text: str) -> Any:
    """A JSON object when it looks like one, else the text itself.

    Raises:
        ValueError: it begins like an object and is none.
    """
    return json.loads(text) if text.lstrip().startswith("{") else text


def comma_separated(text: str) -> list[str]:
    """``"0, 1"`` → ``["0", "1"]``."""
    return [part.strip() for part in text.split(",") if part.strip()]


def lora_module(text: str) -> dict[str, str]:
    """``name=path``, or a JSON object with ``name`` and ``path``.

    Raises:
        ValueError: neither.
    """
    name, equals, path = text.partition("=")
    if text.startswith("{"):
        module = json.loads(text)
    else:
        module = {"name": name, "path": path if equals else ""}
    if not (module.get("name") and module.get("path")):
        raise ValueError(f"{text!r} is neither NAME=PATH nor a JSON object with name and path")
    return module


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
    support: Support = WORKS,
    working: tuple[Any, ...] = (),
    reasons: Mapping[str, str] | None = None,
    known: tuple[str, ...] = (),
    repeatable: bool = False,
    heading: str = "",
    key: str = "",
) -> Any:
    """A configuration field that is a flag.

    Args:
        default: value when the flag is not given; None means "settled later", whatever the type.
        help: one or two sentences, shown by ``--help``.
        aliases: further names, such as ``-tp``.
        one_way: a boolean without a ``--no-`` form.
        nullable: ``""`` and ``None`` on the command line mean None.
        secret: the value is never printed.
        support: what becomes of a value other than the default.
        working: values that act although ``support`` says that the others do not.
        reasons: value → why just this one does not act, a clause.
        known: names worth trying, where plugins may add more.
        repeatable: a list to which every further mention adds.
        heading: the group under which help shows the flag, when it is not the field's own.
        key: the field's name as a JSON key of its group's flag, when it is another.
    """
    info = {
        "help": help, "aliases": aliases, "one_way": one_way, "nullable": nullable, "secret": secret,
        "support": support, "working": working, "reasons": reasons, "known": known,
        "repeatable": repeatable, "heading": heading, "key": key,
    }  # fmt: skip
    return _field(default, {"flag": info})


def group_flag(config_class: type, help: str, *, aliases: tuple[str, ...] = (), support: Support = WORKS) -> Any:
    """A field of VllmConfig that holds a group and is a flag too: a JSON object with the group's fields."""
    info = {"help": help, "aliases": aliases, "support": support}
    return dataclasses.field(default_factory=config_class, metadata={"flag": info})


def json_key(default: Any, help: str, *, support: Support = WORKS, working: tuple[Any, ...] = ()) -> Any:
    """A field that only the JSON flag of its group sets, as in ``-cc.mode=0``."""
    return _field(default, {"json_key": {"help": help, "support": support, "working": working}})


def resolved(default: Any) -> Any:
    """A field that resolution fills in; not a flag."""
    return _field(default, {})


def _field(default: Any, metadata: dict[str, Any]) -> Any:
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


Kind = Literal["bool", "int", "float", "str", "json", "list", "switch_or_str"]
_KINDS: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "str", dict: "json", list: "list"}


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag, read off its field."""

    group: str
    field: str
    type: Any
    """The field's annotation."""
    kind: Kind
    parse: Any
    """Text → value, for the kinds that take one text, and for each item of a list."""
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()
    one_way: bool = False
    nullable: bool = False
    secret: bool = False
    support: Support = WORKS
    working: tuple[Any, ...] = ()
    reasons: Mapping[str, str] | None = None
    known: tuple[str, ...] = ()
    repeatable: bool = False
    heading: str = ""
    key: str = ""
    container: Any = None
    """The group whose fields are the keys of this JSON flag."""

    @property
    def name(self) -> str:
        head, dot, key = self.field.partition(".")
        return "--" + head.replace("_", "-") + dot + key

    @property
    def type_name(self) -> str:
        return {"json": "JSON", "list": "list", "switch_or_str": "[str]"}.get(self.kind, self.kind)

    @property
    def what_works(self) -> str:
        """The values that act, as in "1, 2 work"."""
        values = [
            value if not isinstance(value, bool) else self.name if value else f"--no-{self.name[2:]}"
            for value in self.working
        ]
        return f"{', '.join(map(str, values))} work{'s' if len(values) == 1 else ''}"

    @property
    def level(self) -> Level:
        """``works`` also for a flag of which only some values act."""
        return "works" if self.working else self.support.level

    def check(self, value: Any, *, from_text: bool = False) -> Any:
        """The value as the field's type has it; pieces of text become numbers when ``from_text``.

        Raises:
            ValueError: it is of another type.
        """
        return msgspec.convert(value, dict[str, Any] if self.container else self.type, strict=not from_text)

    def refusal(self, value: Any) -> str | None:
        """Why the value cannot act in this build, in one line; None when it can."""
        if self.support.level == "works" or value == self.default or value in self.working:
            return None
        shown = f"{self.name} {value}"
        if isinstance(value, bool):
            shown = self.name if value else f"--no-{self.name[2:]}"
        elif self.secret:
            shown = self.name
        support = self.support
        works = f"; {self.what_works}" if self.working else ""
        reason = self.reasons.get(value, support.reason) if self.reasons else support.reason  # lists have no hash
        return f"{shown}: {reason}{works}; {support.remedy}."


def flags_of(config_class: type) -> list[FlagSpec]:
    """The flags of one config group, in declaration order."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    fields = [f for f in dataclasses.fields(config_class) if "flag" in f.metadata]
    return [_spec(config_class.__name__, f, hints[f.name], f.metadata["flag"]) for f in fields]


def keys_of(container: FlagSpec) -> dict[str, FlagSpec]:
    """JSON key → what sets it, of a flag whose value is a whole group: another flag, or the key alone."""
    group = container.container
    hints = typing.get_type_hints(group, include_extras=True)
    found = {spec.key or spec.field: spec for spec in flags_of(group)}
    for f in dataclasses.fields(group):
        if "json_key" in f.metadata:
            spec = _spec(group.__name__, f, hints[f.name], f.metadata["json_key"])
            found[f.name] = dataclasses.replace(spec, field=f"{container.field}.{f.name}")
    return found


def _spec(group: str, field: "dataclasses.Field[Any]", hint: Any, info: dict[str, Any]) -> FlagSpec:
    if dataclasses.is_dataclass(hint):
        return FlagSpec(group, field.name, hint, "json", None, {}, container=hint, **info)
    made = field.default_factory
    default = field.default if made is dataclasses.MISSING else made()
    kind, parse, choices = _kind(hint)
    return FlagSpec(group, field.name, hint, kind, parse, default, choices=choices, **info)


def _parser(origin: Any) -> Any:
    return whole_number if origin is int else origin


def _kind(hint: Any) -> tuple[Kind, Any, tuple[Any, ...] | None]:
    """Kind, parser of text and choices that an annotation stands for."""
    parse: Any = None
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        if inner[:2] == [bool, str]:
            return "switch_or_str", str, None
        hint = inner[0]
    if typing.get_origin(hint) is Annotated:
        hint, parse = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return _KINDS[type(choices[0])], parse or _parser(type(choices[0])), choices
    origin = typing.get_origin(hint) or hint
    if origin is list:
        (item,) = typing.get_args(hint)
        return "list", parse, typing.get_args(item) if typing.get_origin(item) is Literal else None
    return _KINDS[origin], parse or _parser(origin), None
