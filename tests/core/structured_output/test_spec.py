"""From a request's fields to one specification."""

import json

import pytest

from tests.core.structured_output.words import spec
from vllm_clone.config import StructuredOutputsConfig
from vllm_clone.core.structured_output.spec import MAX_CHARS, beyond_xgrammar, schema_of
from vllm_clone.errors import RequestError


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(length: int) -> dict[str, object]:
    links = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {}}, "$ref": "#/$defs/d0"}


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "none": ({}, "exactly one of .* got none"),
    "two": ({"regex": "a", "choice": ["b"]}, "exactly one of .* got regex, choice"),
    "no JSON": ({"json": "{bad"}, "json is no JSON: .*line 1 column 2"),
    "empty JSON": ({"json": ""}, "json is no JSON"),
    "a schema that is a list": ({"json": "[1]"}, "a JSON schema is an object, got list"),
    "too deep": ({"json": nested(40)}, "nested 64 deep"),
    "too deep to read": ({"json": "[" * 100_000 + "]" * 100_000}, "nested too deeply|nested 64 deep|object, got list"),
    "a long choice": ({"choice": ["a" * MAX_CHARS]}, "choice: at most 262144 characters"),
    "a long regex": ({"regex": "a" * 65537}, "regex: at most 65536 characters"),
    "many rules": ({"grammar": "".join(f"r{i} ::= r{i + 1}\n" for i in range(1201))}, "at most 1200 rules"),
    "many groups": ({"grammar": "root ::= " + "(" * 1200 + "'a'" + ")" * 1200}, "at most 1200 rules and groups"),
    "a long chain of references": ({"json": chain(500)}, "levels of objects and arrays in all; at most 1200"),
    "half a surrogate pair": ({"regex": "a\ud800"}, "not valid Unicode: .* at 1"),
    "json_object false": ({"json_object": False}, "must be true"),
    "empty regex": ({"regex": ""}, "empty"),
    "NUL": ({"regex": "a\0b"}, "NUL .* position 1"),
    "look-ahead": ({"regex": "a(?=b)"}, r"look-around \(\(\?=.*position 1"),
    "look-behind": ({"regex": "(?<!a)b"}, "look-around .* position 0"),
    "no choice": ({"choice": []}, "at least one"),
    "a choice that is no text": ({"choice": ["a", 1]}, "item 1 is int"),
    "empty grammar": ({"grammar": " \n"}, "grammar is empty"),
    "a tag that is no object": ({"structural_tag": "3"}, "JSON object, got int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_library_takes_is_refused_with_the_place(name: str):
    fields, said = REFUSED[name]
    with pytest.raises(RequestError, match=said):
        spec(**fields)


def test_zero_or_two_constraints_name_the_field():
    with pytest.raises(RequestError) as caught:
        spec(regex="a", grammar="root ::= 'a'")
    assert caught.value.param == "structured_outputs"


def test_an_escaped_bracket_begins_no_look_around():
    assert spec(regex=r"\(?=a").text == r"\(?=a"


def test_the_depth_that_the_protocol_allows_is_accepted():
    assert schema_of(spec(json=nested(31)))["properties"]


def test_many_references_are_no_long_chain():
    leaf = {"type": "object", "properties": {"x": {"type": "integer"}}}
    many = {"properties": {f"p{i}": {"$ref": f"#/$defs/d{i % 50}"} for i in range(600)}}
    assert schema_of(spec(json={**many, "$defs": {f"d{i}": leaf for i in range(50)}}))["properties"]


def test_equal_requests_give_equal_specifications_whatever_their_form():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert spec(json=schema) == spec(json=json.dumps(schema, indent=2))
    assert hash(spec(json=schema)) == hash(spec(json=schema))
    assert spec(json=schema) != spec(json={"type": "object", "properties": {"a": {}, "b": {}}}), "order matters"


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("request_says", [True, False])
def test_whitespace_is_off_when_server_or_request_says_so(config: bool, request_says: bool):
    made = spec(
        StructuredOutputsConfig(disable_any_whitespace=config), json_object=True, disable_any_whitespace=request_says
    )
    assert made.any_whitespace == (not (config or request_says))


def test_objects_are_closed_on_every_level_but_data_stays_data():
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    schema = {
        "properties": {"a": inner, "open": {"properties": {}, "additionalProperties": True}, "any": {"type": "object"}},
        "$defs": {"d": inner},
        "enum": [{"properties": {"x": 1}}],
        "anyOf": [inner],
    }
    closed = {**inner, "additionalProperties": False}
    assert schema_of(spec(json=schema)) == {
        "properties": {"a": closed, "open": schema["properties"]["open"], "any": {"type": "object"}},  # type: ignore[index]
        "$defs": {"d": closed},
        "enum": [{"properties": {"x": 1}}],
        "anyOf": [closed],
        "additionalProperties": False,
    }


def test_parts_of_one_object_are_not_closed_against_each_other():
    schema = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    assert schema_of(spec(json=schema)) == schema


def test_a_whitespace_pattern_needs_guidance():
    with pytest.raises(RequestError, match="whitespace_pattern needs the guidance backend"):
        spec(StructuredOutputsConfig(backend="xgrammar"), json_object=True, whitespace_pattern=" ")


@pytest.mark.parametrize(
    ("schema", "lost"),
    [
        ({"properties": {"uniqueItems": {"type": "array"}}}, None),
        ({"properties": {"a": {"uniqueItems": True}}}, "uniqueItems"),
        ({"enum": [{"not": 1}]}, None),
        ({"items": [{"not": {}}]}, "not"),
        ({"pattern": "a"}, None),
        ({"properties": {"a": {}}, "required": ["a"]}, None),
        ({"required": ["a"]}, "required names that are no properties"),
    ],
)
def test_constraints_that_xgrammar_would_drop_are_found(schema: dict[str, object], lost: str | None):
    assert beyond_xgrammar(spec(json=schema)) == lost
