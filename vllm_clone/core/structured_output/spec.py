"""From a request's fields to one specification of a grammar, and every check that needs no library.

Shared by the frontend, which refuses early, and the engine, which compiles.
"""

import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from vllm_clone.config import StructuredOutputsConfig
from vllm_clone.errors import RequestError
from vllm_clone.sampling_params import StructuredOutputsParams

GrammarKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]

MAX_CHARS = 1 << 18
MAX_GRAMMAR_CHARS = 1 << 16
"""Longest JSON text, and longest regex or grammar: longer ones take seconds to compile and megabytes to keep."""
MAX_RULES = 1200
MAX_LEVELS = 1200
"""Most rules and groups of a grammar, and most levels of a schema with its references followed: compilers recurse over
them, and the stack ends at about twice as many."""
MAX_DEPTH = 64
MAX_TAG_DEPTH = 80
"""Most objects and arrays within one another, as in vLLM."""
MAX_BLANKS = 20
"""Most blanks and line ends between two parts of JSON. Small models do not find out of an endless run of them."""
ANY_OBJECT = '{"type": "object"}'

NOT_IN_XGRAMMAR = (
    "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "dependentRequired", "dependentSchemas",
    "allOf",
)  # fmt: skip
"""Keywords that xgrammar takes without holding the text to them."""
_PLAIN = frozenset({"const", "enum", "default", "examples", "required"})
"""Keywords whose value is data."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value is schemas by name."""
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_ESCAPED = re.compile(r"\\.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a backend compiles; equal specifications mean the same grammar."""

    kind: GrammarKind
    text: str
    """JSON text of the schema, the choices or the structural tag; the regex or grammar as it is."""
    any_whitespace: bool = True
    """JSON may have up to :data:`MAX_BLANKS` blanks and line ends between its parts."""
    whitespace_pattern: str | None = None
    """Regex of what may stand between the parts of JSON instead."""
    closed_objects: bool = False
    """Objects whose schema lists properties have no others, unless the schema says that they may."""


def make_spec(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> GrammarSpec:
    """The specification that a request's parameters stand for.

    Raises:
        RequestError: they are none or several constraints, or one that no backend takes; says where.
    """
    kinds = [name for name in KINDS if getattr(params, name) is not None]
    if len(kinds) != 1:
        shown = f"got {', '.join(kinds)}" if kinds else "got none"
        raise RequestError(
            f"structured_outputs needs exactly one of {', '.join(KINDS)}; {shown}.", param="structured_outputs"
        )
    name = kinds[0]
    kind, text = _READERS[name](getattr(params, name))
    limit = MAX_GRAMMAR_CHARS if kind in ("regex", "grammar") else MAX_CHARS
    if len(text) > limit:
        raise RequestError(f"{name}: at most {limit} characters are allowed, got {len(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: {error.reason} at {error.start}.") from error
    if kind not in ("json", "structural_tag"):
        return GrammarSpec(kind, text)
    pattern = params.whitespace_pattern
    if pattern is not None and config.backend == "xgrammar":
        raise RequestError(
            "whitespace_pattern needs the guidance backend; this server was started with "
            '--structured-outputs-config.backend xgrammar. Use "disable_any_whitespace" instead.'
        )
    return GrammarSpec(
        kind,
        text,
        any_whitespace=not (config.disable_any_whitespace or params.disable_any_whitespace),
        whitespace_pattern=pattern,
        # xgrammar closes them always; an answer must not depend on which backend auto finds.
        closed_objects=(
            config.disable_additional_properties or params.disable_additional_properties or config.backend != "guidance"
        ),
    )


def schema_of(spec: GrammarSpec) -> Any:
    """The JSON value of a specification's text, with objects closed when it asks for that."""
    value = json.loads(spec.text)
    # Parts of allOf describe one object together: closed, they would exclude each other.
    return _closed(value) if spec.closed_objects and '"allOf"' not in spec.text else value


def beyond_xgrammar(spec: GrammarSpec) -> str | None:
    """Something in a JSON schema that xgrammar would not hold the text to, or None."""
    if spec.whitespace_pattern is not None:
        return "whitespace_pattern"
    return _lost(json.loads(spec.text)) if spec.kind == "json" else None


def has_xgrammar() -> bool:
    """Whether the extra package is installed."""
    return importlib.util.find_spec("xgrammar") is not None


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _PLAIN:
            closed[key] = value
        elif key in _NAMED and isinstance(value, dict):
            closed[key] = {name: _closed(part) for name, part in value.items()}
        else:
            closed[key] = _closed(value)
    if isinstance(schema.get("properties"), dict) and "unevaluatedProperties" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _lost(schema: Any) -> str | None:
    """The first constraint within a schema that xgrammar drops."""
    if isinstance(schema, list):
        return next((lost for item in schema if (lost := _lost(item)) is not None), None)
    if not isinstance(schema, dict):
        return None
    for name in NOT_IN_XGRAMMAR:
        if name in schema:
            return name
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        return "pattern together with minLength or maxLength"
    properties = schema.get("properties")
    required = schema.get("required")
    if isinstance(required, list) and any(name not in (properties or ()) for name in required):
        return "required names that are no properties"
    parts: list[Any] = []
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            parts += value.values()
        elif key not in _PLAIN:
            parts.append(value)
    return _lost(parts)


# ---- readers: value → kind and text ----


def _schema(value: "str | dict[str, Any]") -> tuple[GrammarKind, str]:
    parsed = _parsed("json", value) if isinstance(value, str) else value
    if not isinstance(parsed, dict | bool):
        raise RequestError(f"json: a JSON schema is an object, got {type(parsed).__name__}.")
    _check_depth("json", parsed, MAX_DEPTH)
    return "json", json.dumps(parsed, ensure_ascii=False)


def _json_object(value: bool) -> tuple[GrammarKind, str]:
    if value is not True:
        raise RequestError("json_object must be true; leave it out for free text.")
    return "json", ANY_OBJECT


def _regex(value: str) -> tuple[GrammarKind, str]:
    if not value:
        raise RequestError("regex: the pattern is empty, which leaves no text at all.")
    if "\0" in value:
        raise RequestError(f"regex: NUL characters are not allowed, found one at position {value.index(chr(0))}.")
    found = _LOOK_AROUND.search(_ESCAPED.sub("__", value))
    if found is not None:
        raise RequestError(
            f"regex: look-around ({value[found.start() : found.end()]}…) at position {found.start()} is not supported."
        )
    return "regex", value


def _choice(value: list[str]) -> tuple[GrammarKind, str]:
    if not value:
        raise RequestError("choice needs at least one text.")
    wrong = next((i for i, item in enumerate(value) if not isinstance(item, str)), None)
    if wrong is not None:
        raise RequestError(f"choice: item {wrong} is {type(value[wrong]).__name__}, and must be a string.")
    return "choice", json.dumps(value, ensure_ascii=False)


def _grammar(value: str) -> tuple[GrammarKind, str]:
    if not value.strip():
        raise RequestError("grammar is empty; it needs a rule named root (GBNF) or start (Lark).")
    rules = value.replace("::=", ":").count(":") + value.count("(") + value.count("[")
    if rules > MAX_RULES:
        raise RequestError(f"grammar: at most {MAX_RULES} rules and groups (: and brackets) are allowed, got {rules}.")
    return "grammar", value


def _structural_tag(value: str) -> tuple[GrammarKind, str]:
    parsed = _parsed("structural_tag", value)
    if not isinstance(parsed, dict):
        raise RequestError(f"structural_tag must be a JSON object, got {type(parsed).__name__}.")
    _check_depth("structural_tag", parsed, MAX_TAG_DEPTH)
    return "structural_tag", json.dumps(parsed, ensure_ascii=False)


_READERS: dict[str, Any] = {
    "json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar, "json_object": _json_object,
    "structural_tag": _structural_tag,
}  # fmt: skip
KINDS = tuple(_READERS)
"""Names of the constraints, of which a request gives one."""


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise RequestError(f"{name}: the text is nested too deeply.") from error
    except ValueError as error:
        raise RequestError(f"{name} is no JSON: {error}.") from error


def _check_depth(name: str, value: Any, limit: int) -> None:
    depth = _depth(value, limit + 1)
    if depth > limit:
        raise RequestError(f"{name}: objects and arrays may be nested {limit} deep, and these are deeper.")
    levels = depth + sum(_depth(_target(value, ref), limit) for ref in _references(value))
    if levels > MAX_LEVELS:
        raise RequestError(
            f"{name}: what its $ref name is {levels} levels of objects and arrays in all; at most {MAX_LEVELS} are "
            "allowed."
        )


def _depth(value: Any, limit: int) -> int:
    """Objects and arrays within one another, counted up to ``limit``."""
    level, depth = _containers([value]), 0
    while level and depth < limit:
        depth += 1
        level = [child for item in level for child in _containers(item.values() if isinstance(item, dict) else item)]
    return depth


def _containers(items: Iterable[Any]) -> list[Any]:
    return [item for item in items if isinstance(item, dict | list)]


def _references(value: Any) -> set[str]:
    """Every distinct ``$ref``."""
    found: set[str] = set()
    level = _containers([value])
    while level:
        found |= {item["$ref"] for item in level if isinstance(item, dict) and isinstance(item.get("$ref"), str)}
        level = [child for item in level for child in _containers(item.values() if isinstance(item, dict) else item)]
    return found


def _target(root: Any, ref: str) -> Any:
    """What a reference names; the whole schema where that is not plain to see."""
    value = root
    for key in ref.removeprefix("#").split("/")[1:]:
        if not isinstance(value, dict):
            return root
        value = value.get(key.replace("~1", "/").replace("~0", "~"), root)
    return value
