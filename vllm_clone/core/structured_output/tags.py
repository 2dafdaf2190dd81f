"""Structural tags as Lark: free text in which certain marks begin something that follows a grammar.

Two forms of the same thing are read. The older one has ``structures`` and ``triggers``; the newer one is a tree of
``format`` objects, of which the common types are known here.
"""

import json
import re
from typing import Any

from vllm_clone.core.structured_output.grammar import GrammarError
from vllm_clone.core.structured_output.spec import MAX_BLANKS, GrammarSpec

_TEXT = r"/(.|\n)*/"


def tag_grammar(tag: dict[str, Any], spec: GrammarSpec, special: dict[bytes, int]) -> str:
    """A structural tag as a Lark grammar of llguidance.

    Raises:
        GrammarError: a part is malformed or of a type not known here; the message names its place.
    """
    builder = _Builder(spec, special)
    if "structures" in tag:
        body = builder.triggered(_from_structures(tag), "structures")
    elif "format" in tag:
        body = builder.part(tag["format"], "format")
    else:
        raise GrammarError("a structural tag needs format, or structures and triggers")
    return "\n".join(["%llguidance {}", f"start: {body}", *builder.rules]) + "\n"


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("structures must be a list of at least one object with begin, schema and end")
    tags = []
    for i, part in enumerate(structures):
        if not isinstance(part, dict):
            raise GrammarError(f"structures[{i}] must be an object with begin, schema and end")
        content = {"type": "json_schema", "json_schema": part.get("schema")}
        tags.append({"type": "tag", "begin": part.get("begin"), "content": content, "end": part.get("end")})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def json_options(spec: GrammarSpec) -> dict[str, Any]:
    """llguidance's settings for JSON. What oneOf means exactly no automaton of ours can say: any of them is taken."""
    options: dict[str, Any] = {"coerce_one_of": True}
    if spec.whitespace_pattern is not None:
        options["whitespace_pattern"] = spec.whitespace_pattern
    elif not spec.any_whitespace:
        options |= {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    else:
        options["whitespace_pattern"] = rf"[ \t\n\r]{{1,{MAX_BLANKS}}}"
    return options


class _Builder:
    """Collects the rules of one grammar; every method gives a Lark expression."""

    def __init__(self, spec: GrammarSpec, special: dict[bytes, int]) -> None:
        self.rules: list[str] = []
        self._options = json_options(spec)
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._names = re.compile(b"(" + b"|".join(map(re.escape, names)) + b")") if names else None

    def part(self, part: Any, where: str, end: str | None = None) -> str:
        """One format object; with ``end`` the text that closes it, which free text must not swallow."""
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise GrammarError(f"{where} must be an object with a type")
        kind = part["type"]
        if kind == "any_text":
            return self._free_text(end)
        closing = "" if end is None else " " + self.literal(end)
        if kind == "const_string":
            return self.literal(_string(part, "value", where)) + closing
        if kind == "json_schema":
            return self._json(part, where) + closing
        if kind == "regex":
            return self._regex(_string(part, "pattern", where)) + closing
        if kind in ("sequence", "or"):
            elements = _list(part, "elements", where)
            parts = [self.part(e, f"{where}.elements[{i}]") for i, e in enumerate(elements)]
            return self._rule((" " if kind == "sequence" else " | ").join(parts)) + closing
        if kind == "tag":
            return self._tag(part, where) + closing
        if kind == "triggered_tags":
            return self._rule(self.triggered(part, where)) + closing
        if kind == "tags_with_separator":
            return self._separated(part, where) + closing
        raise GrammarError(f"{where}: type {kind!r} is not known to the guidance backend")

    def triggered(self, part: dict[str, Any], where: str) -> str:
        """Free text in which each trigger begins one of its tags."""
        triggers = _list(part, "triggers", where)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise GrammarError(f"{where}: triggers must be texts that are not empty")
        options, tags = [], []
        for i, tag in enumerate(_list(part, "tags", where)):
            place = f"{where}.tags[{i}]"
            if not isinstance(tag, dict):
                raise GrammarError(f"{place} must be an object")
            begin = _string(tag, "begin", place)
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise GrammarError(f"{place}: begin {begin!r} starts with none of the triggers {triggers}")
            rest = self._tag({**tag, "begin": begin[len(trigger) :]}, place)
            options.append(f"{self._up_to(trigger)} {rest}")
            tags.append(self._tag(tag, place))
        later, text = self._rule(" | ".join(options)), self._free_text(None)
        rest = "" if part.get("stop_after_first") else f" {later}* {text}"
        if part.get("at_least_one"):  # at once, before any text
            return f"{self._rule(' | '.join(tags))}{rest}"
        return rest or f"{later} | {text}"

    def literal(self, text: str) -> str:
        """A fixed text, with the special tokens in it as such."""
        if not text:
            return '""'
        pieces = [text.encode()] if self._names is None else self._names.split(text.encode())
        shown = [
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece.decode(), ensure_ascii=False)
            for piece in pieces
            if piece
        ]
        return " ".join(shown)

    def _tag(self, part: dict[str, Any], where: str) -> str:
        begin, end = _string(part, "begin", where), part.get("end", "")
        if isinstance(end, list) and end and all(isinstance(e, str) for e in end):
            choices = [self.part(part.get("content"), f"{where}.content", e) for e in end]
            return self._rule(f"{self.literal(begin)} ({' | '.join(choices)})")
        if not isinstance(end, str):
            raise GrammarError(f"{where}.end must be a text or a list of texts")
        return self._rule(f"{self.literal(begin)} {self.part(part.get('content'), f'{where}.content', end)}")

    def _separated(self, part: dict[str, Any], where: str) -> str:
        tags = _list(part, "tags", where)
        one = self._rule(" | ".join(self.part(tag, f"{where}.tags[{i}]") for i, tag in enumerate(tags)))
        if part.get("stop_after_first"):
            body = one
        else:
            body = f"{one} ({self.literal(_string(part, 'separator', where))} {one})*"
        return self._rule(body if part.get("at_least_one") else f"({body})?")

    def _json(self, part: dict[str, Any], where: str) -> str:
        schema = part.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"{where}: json_schema must be a schema object")
        if schema is False:
            raise GrammarError(f"{where}: the schema false allows no value at all")
        schema = {} if schema is True else schema
        return "%json " + json.dumps({**schema, "x-guidance": self._options}, ensure_ascii=False)

    def _regex(self, pattern: str) -> str:
        return "/" + pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n") + "/"

    def _free_text(self, end: str | None) -> str:
        if not end:
            return self._rule(_TEXT, terminal=True)
        return self._up_to(end)

    def _up_to(self, mark: str) -> str:
        """Any text that ends with the first ``mark``."""
        shown = self.literal(mark)
        if shown.startswith("<["):  # a token that no text holds needs no search
            return f"{self._rule(_TEXT, terminal=True)} {shown}"
        return self._rule(f"{_TEXT} {json.dumps(mark, ensure_ascii=False)}", lazy=True)

    def _rule(self, body: str, *, terminal: bool = False, lazy: bool = False) -> str:
        name = f"{'TEXT' if terminal else 'part'}_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def _string(part: dict[str, Any], key: str, where: str) -> str:
    value = part.get(key)
    if not isinstance(value, str):
        raise GrammarError(f"{where}.{key} must be a text")
    return value


def _list(part: dict[str, Any], key: str, where: str) -> list[Any]:
    value = part.get(key)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{where}.{key} must be a list that is not empty")
    return value
