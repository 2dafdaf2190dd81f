"""Both libraries behind one interface."""

import json
import re
from collections.abc import Callable

import pytest

from tests.core.structured_output.words import (
    END_TOO,
    EOS,
    MARK,
    PADDING,
    PIECES,
    SIZE,
    allowed,
    ramble,
    say,
    spec,
    vocabulary,
)
from vllm_clone.config import StructuredOutputsConfig
from vllm_clone.core.structured_output.backend import Backend, Backends
from vllm_clone.core.structured_output.grammar import GrammarError
from vllm_clone.core.structured_output.guidance import GuidanceBackend, validate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
SEEDS = range(12)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
LIST = 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9] [0-9]?'
LARK = 'start: "<" WORD ">"\nWORD: /[a-c]{1,3}/'


@pytest.fixture(scope="module", params=["guidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "guidance":
        return GuidanceBackend(vocabulary())
    pytest.importorskip("xgrammar")
    from vllm_clone.core.structured_output.xgrammar import XGrammarBackend

    return XGrammarBackend(vocabulary())


def person_is_valid(text: bytes) -> bool:
    value = json.loads(text)
    known = value.keys() <= {"name", "age", "tags"} and {"name", "age"} <= value.keys()
    tags = value.get("tags", [])
    return known and len(value["name"]) <= 5 and 0 <= value["age"] <= 150 and len(tags) < 3 and set(tags) <= {"x", "y"}


VALID: dict[str, tuple[dict[str, object], Callable[[bytes], object]]] = {
    "json": ({"json": PERSON, "disable_any_whitespace": True}, person_is_valid),
    "json text": ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, person_is_valid),
    "regex": ({"regex": r"[0-9]{3}-[a-f]{2,4}"}, lambda text: re.fullmatch(rb"[0-9]{3}-[a-f]{2,4}", text)),
    "choice": ({"choice": ["yes", "no", 'say "no"', "né\n"]},
               lambda text: text.decode() in ["yes", "no", 'say "no"', "né\n"]),
    "GBNF": ({"grammar": LIST}, lambda text: re.fullmatch(rb"\[\d\d?(,\d\d?)*\]", text)),
    "Lark": ({"grammar": LARK}, lambda text: re.fullmatch(rb"<[a-c]{1,3}>", text)),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALID)
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_masks_allow_is_valid(backend: Backend, kind: str, seed: int):
    fields, is_valid = VALID[kind]
    matcher = backend.compile(spec(**fields)).matcher([])
    assert is_valid(ramble(matcher, seed))
    assert matcher.is_terminated


def test_one_compiled_grammar_serves_many_requests_at_different_places(backend: Backend):
    compiled = backend.compile(spec(choice=["yes", "no"]))
    one, other = compiled.matcher([]), compiled.matcher([])
    assert say(one, b"n")
    assert say(other, b"yes")
    assert allowed(one) == {ord("o")}
    assert allowed(other) == {EOS}
    assert compiled.size_bytes > 0


def test_ids_that_are_no_text_are_masked_off_and_so_is_padding(backend: Backend):
    matcher = backend.compile(spec(regex=r"[\s\S]+")).matcher([])
    first = allowed(matcher)
    assert not first & {EOS, MARK, END_TOO}
    assert max(first) < SIZE - PADDING
    assert first & {ord("a"), 259}
    assert say(matcher, b"a")
    assert allowed(matcher) - first == {EOS}


def test_stop_ids_of_the_request_end_the_text_where_it_may_end(backend: Backend):
    matcher = backend.compile(spec(regex="ab?")).matcher([EOS, END_TOO, ord("b")])
    assert not allowed(matcher) & {EOS, END_TOO}
    assert say(matcher, b"a")
    assert allowed(matcher) == {EOS, END_TOO, ord("b")}, "a stop id that is text stays text"
    assert matcher.accept(END_TOO)
    assert matcher.is_terminated


def test_a_token_that_is_not_allowed_is_refused(backend: Backend):
    compiled = backend.compile(spec(regex="ab"))
    assert not compiled.matcher([]).accept(ord("b"))
    assert not compiled.matcher([]).accept(EOS), "too early"


def test_a_text_that_has_ended_takes_anything(backend: Backend):
    matcher = backend.compile(spec(regex="a")).matcher([])
    assert say(matcher, [ord("a"), EOS])
    assert matcher.accept(ord("z"))
    assert matcher.is_terminated


def test_whitespace_in_json_is_free_unless_it_is_switched_off(backend: Backend):
    free = backend.compile(spec(json=PERSON)).matcher([])
    tight = backend.compile(spec(json=PERSON, disable_any_whitespace=True)).matcher([])
    assert say(free, b'{ "name" :\n"a", "age":1}')
    assert not say(tight, b'{ "')
    assert say(backend.compile(spec(json=PERSON, disable_any_whitespace=True)).matcher([]), b'{"name":"a","age":1}')


def test_objects_are_closed_but_not_when_the_schema_opens_them(backend: Backend):
    extra = b'{"name":"a","age":1,"more":2}'
    assert not say(backend.compile(spec(json=PERSON)).matcher([]), extra)
    assert say(backend.compile(spec(json={**PERSON, "additionalProperties": True})).matcher([]), extra)
    assert say(backend.compile(spec(json_object=True)).matcher([]), extra)


def test_with_guidance_named_objects_are_open_unless_closed_by_the_request():
    config = StructuredOutputsConfig(backend="guidance")
    extra = b'{"name":"a","age":1,"more":2}'
    backend = GuidanceBackend(vocabulary())
    assert say(backend.compile(spec(config, json=PERSON)).matcher([]), extra)
    assert not say(backend.compile(spec(config, json=PERSON, disable_additional_properties=True)).matcher([]), extra)


def test_a_whitespace_pattern_is_what_may_stand_between_the_parts():
    made = GuidanceBackend(vocabulary()).compile(spec(json=PERSON, whitespace_pattern=" ?"))
    assert say(made.matcher([]), b'{ "name": "a", "age" :1}')
    assert not say(made.matcher([]), b'{  "')
    assert not say(made.matcher([]), b'{\n"')


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}
TAGS: list[tuple[dict[str, object], bytes, bytes | None]] = [
    # structural tag, a text that it takes, a text that it does not take
    ({"format": TAG}, b'<f>{"a":1}</f>', b"x"),
    ({"format": TRIGGERED}, b'text <f>{"a":1}</f> and <f>{"a":2}</f>.', b'text <f>{"b"'),
    ({"format": {**TRIGGERED, "at_least_one": True}}, b'<f>{"a":1}</f> hm <f>{"a":2}</f>', b"hm"),
    ({"format": {**TRIGGERED, "stop_after_first": True}}, b'hm <f>{"a":1}</f>', b'<f>{"a":1}</f>x'),
    ({"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]},
     b'text <f>{"a":1}</f> end', b"text <f>x"),
    ({"format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "A: "}, {"type": "regex", "pattern": "[0-9]+/[0-9]"}]}}, b"A: 12/3", b"A: x"),
    ({"format": {"type": "or", "elements": [
        {"type": "const_string", "value": "yes"}, {"type": "const_string", "value": "no"}]}}, b"no", b"m"),
    ({"format": {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}}, b"<t>a < b</t>",
     b"<t>a</t>b"),
    ({"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ";", "at_least_one": True}},
     b'<f>{"a":1}</f>;<f>{"a":2}</f>', b"x"),
]  # fmt: skip


@pytest.mark.parametrize(("tag", "good", "bad"), TAGS)
def test_structural_tags(backend: Backend, tag: dict[str, object], good: bytes, bad: bytes | None):
    made = backend.compile(spec(structural_tag=json.dumps({"type": "structural_tag", **tag})))
    matcher = made.matcher([])
    assert say(matcher, good)
    assert EOS in allowed(matcher)
    if bad is not None:
        assert not say(made.matcher([]), bad)


def test_a_tag_that_must_come_must_come_before_the_end(backend: Backend):
    tag = json.dumps({"type": "structural_tag", "format": {**TRIGGERED, "at_least_one": True}})
    made = backend.compile(spec(structural_tag=tag))
    assert EOS not in allowed(made.matcher([]))
    assert not say(made.matcher([]), b"some text")


def test_the_marks_of_a_tag_may_be_special_tokens(backend: Backend):
    tag = {"format": {**TAG, "begin": "<mark>", "end": "<eot>"}}
    matcher = backend.compile(spec(structural_tag=json.dumps({"type": "structural_tag", **tag}))).matcher([])
    assert say(matcher, [MARK, *b'{"a":1}', END_TOO])


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "unknown type": ({"json": {"type": "nonsense"}}, "nonsense"),
    "dangling reference": ({"json": {"type": "object", "properties": {"a": {"$ref": "#/nope"}}}}, "nope"),
    "open class": ({"regex": "(["}, r"clos|position"),
    "open group": ({"grammar": "root ::= ("}, "line 1"),
    "undefined rule": ({"grammar": "root ::= foo"}, "foo"),
    "no root": ({"grammar": "rule ::= 'a'"}, r"root|line 1"),
    "unknown tag": ({"structural_tag": '{"format": {"type": "zzz"}}'}, "zzz"),
    "tag without begin": ({"structural_tag": '{"format": {"type": "tag", "content": {"type": "any_text"}}}'}, "begin"),
    "structures that are none": ({"structural_tag": '{"structures": 3, "triggers": ["a"]}'}, "structures"),
    "empty tag": ({"structural_tag": "{}"}, "format"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_compiled_says_where(backend: Backend, name: str):
    fields, said = WRONG[name]
    with pytest.raises(GrammarError, match=said):
        backend.compile(spec(**fields))


@pytest.mark.parametrize("name", WRONG)
def test_the_frontend_sees_the_same_mistakes_without_a_vocabulary(name: str):
    fields, said = WRONG[name]
    wrong = validate(spec(**fields))
    assert wrong is not None
    assert re.search(said, wrong)


def test_the_place_of_a_mistake_is_one_in_the_regex_itself():
    wrong = validate(spec(regex="ab(c"))
    assert wrong is not None
    assert wrong.startswith('invalid regex "ab(c"')
    assert wrong.endswith("unclosed group")
    assert "\n      ^\n" in wrong, "under the bracket"


@pytest.mark.parametrize("name", VALID)
def test_the_frontend_sees_no_mistakes_where_there_are_none(name: str):
    assert validate(spec(**VALID[name][0])) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"properties": {"a": {"not": {"type": "integer"}}}},
        {"anyOf": [{"type": "string", "pattern": "^a+$", "maxLength": 2}]},
        {"type": "object", "properties": {"a": {}}, "required": ["z"]},
    ],
)
def test_xgrammar_refuses_what_it_would_not_hold_the_text_to(schema: dict[str, object]):
    pytest.importorskip("xgrammar")
    from vllm_clone.core.structured_output.xgrammar import XGrammarBackend

    with pytest.raises(GrammarError, match="does not hold"):
        XGrammarBackend(vocabulary()).compile(spec(json=schema))


def test_auto_falls_back_to_guidance_for_what_xgrammar_cannot():
    backends = Backends(StructuredOutputsConfig(), vocabulary)
    both = spec(json={"type": "string", "pattern": "^a+$", "maxLength": 2})
    backends.load(both)
    matcher = backends.compile(both).matcher([])
    assert say(matcher, b'"aa')
    assert ord('"') in allowed(matcher)
    assert ord("a") not in allowed(matcher)


def test_auto_uses_guidance_alone_where_xgrammar_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm_clone.core.structured_output.backend.has_xgrammar", lambda: False)
    backends = Backends(StructuredOutputsConfig(), vocabulary)
    backends.load(spec(regex="ab"))
    matcher = backends.compile(spec(regex="ab")).matcher([])
    assert type(matcher).__name__ == "GuidanceMatcher"
    assert allowed(matcher) == {259 + PIECES.index(b"ab")}, "as the tokenizer would write it"
