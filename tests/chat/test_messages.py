"""Messages as clients send them become what templates expect; nonsense is the request's error, never a crash."""

from typing import Any

import pytest

from tests.chat.conftest import renderer
from tests.chat.styles import CHATML, STYLES
from vllm_clone.chat.messages import MEDIA_PARTS, normalise
from vllm_clone.chat.template import wants_content_parts
from vllm_clone.errors import RequestError


def one(message: dict[str, Any], *, parts: bool = False, developer_is_system: bool = True) -> dict[str, Any]:
    (result,) = normalise([message], parts=parts, developer_is_system=developer_is_system, model="smol")
    return result


def text_part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_text_parts_are_joined_by_newlines() -> None:
    message = {"role": "user", "content": [text_part("a"), text_part("b"), "c"]}
    assert one(message)["content"] == "a\nb\nc"
    assert one(message, parts=True)["content"] == [text_part("a"), text_part("b"), text_part("c")]


def test_text_becomes_one_part_for_templates_that_loop() -> None:
    assert one({"role": "user", "content": "a"}, parts=True)["content"] == [text_part("a")]


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_missing_content_is_empty_text(role: str, message: dict[str, Any]) -> None:
    assert one({"role": role, **message})["content"] == ""


@pytest.mark.parametrize(
    "part",
    [{"type": "input_text", "text": "x"}, {"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "x"},
     {"type": "thinking", "thinking": "x"}],
)  # fmt: skip
def test_every_kind_of_text_part_gives_its_text(part: dict[str, Any]) -> None:
    assert one({"role": "assistant", "content": [part]})["content"] == "x"


def test_developer_is_system_where_the_template_knows_no_developer(user: list[dict[str, Any]]) -> None:
    messages = [{"role": "developer", "content": "D"}, *user]
    assert "<|im_start|>system\nD<|im_end|>" in renderer(CHATML).render(messages)
    knows = "{% for m in messages %}{% if m.role == 'developer' %}dev{% endif %}{% endfor %}"
    assert renderer(knows).render(messages) == "dev"


def test_any_other_role_reaches_the_template() -> None:
    assert one({"role": "critic", "content": "x"})["role"] == "critic"


def test_names_and_call_ids_are_kept_and_nulls_are_not() -> None:
    message = {"role": "tool", "content": "x", "tool_call_id": "c1", "name": "f", "tool_calls": None, "audio": None}
    assert one(message) == {"role": "tool", "content": "x", "tool_call_id": "c1", "name": "f"}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_known_under_both_names(field: str) -> None:
    message = one({"role": "assistant", "content": "x", field: "why"})
    assert (message["reasoning"], message["reasoning_content"]) == ("why", "why")
    assert "<think>\nwhy\n</think>\n\nx" in renderer(STYLES["qwen"]).render(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x", field: "why"}]
    )


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": [1, "é"]}', {"a": [1, "é"]}), ("", {}), (None, {}), ({"a": 1}, {"a": 1}), ("{}", {})],
)
def test_arguments_of_calls_become_objects(arguments: Any, parsed: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = one({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"] == [{**call, "function": {"name": "f", "arguments": parsed}}]


# ---- refusals ----


def refused(message: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        normalise([message], parts=False, developer_is_system=True, model="smol")
    assert (caught.value.kind, caught.value.param) == ("invalid", None)
    return caught.value


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="must not be empty"):
        normalise([], parts=False, developer_is_system=True, model="smol")


@pytest.mark.parametrize("kind", sorted(MEDIA_PARTS))
def test_media_are_refused_before_anything_is_fetched(kind: str) -> None:
    error = refused(
        {"role": "user", "content": [text_part("what is this?"), {"type": kind, kind: {"url": "http://x"}}]}
    )
    assert "smol is not a multimodal model" in str(error)


@pytest.mark.parametrize(
    "part", [{"type": "zzz"}, {"text": "x"}, {}, 5, None, [], {"type": 5}, {"type": ["text"]}, {"type": "text"},
             text_part(5), text_part(None), {"type": "refusal", "text": "x"}]
)  # fmt: skip
def test_parts_that_are_no_text_are_refused(part: Any) -> None:
    assert "content part" in str(refused({"role": "user", "content": [part]}))


@pytest.mark.parametrize("content", [5, {"type": "text"}, True, b"x"])
def test_content_of_another_type_is_refused(content: Any) -> None:
    assert "must be text or a list of parts" in str(refused({"role": "user", "content": content}))


@pytest.mark.parametrize("message", [5, None, "x", {}, {"role": None}, {"role": 5, "content": "x"}])
def test_messages_without_role_are_refused(message: Any) -> None:
    assert "object with a string role" in str(refused(message))


@pytest.mark.parametrize("arguments", ["{", "nope", '{"a": }', "[" * 100_000])
def test_arguments_that_are_not_json_are_refused(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert "arguments of a tool call are not JSON" in str(refused({"role": "assistant", "tool_calls": [call]}))


@pytest.mark.parametrize("calls", [[5], [{}], [{"function": "f"}], [None], {"function": {}}, "f"])
def test_calls_without_function_are_refused(calls: Any) -> None:
    assert "tool" in str(refused({"role": "assistant", "tool_calls": calls}))


# ---- what a template expects ----


@pytest.mark.parametrize(
    ("template", "wants_parts"),
    [
        (STYLES["chatml"], False),
        (STYLES["llama3"], False),
        (STYLES["qwen"], False),
        (STYLES["gemma"], True),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.content | selectattr('type') | list %}x{% endfor %}{% endfor %}", True),
        ("{% set content = messages %}{% for c in content %}{{ c.content }}{% endfor %}", False),
        ("plain", False),
        ("{% broken", False),
    ],
)
def test_the_content_format_is_seen_in_the_template(template: str, wants_parts: bool) -> None:
    assert wants_content_parts(template) is wants_parts


def test_the_operator_may_fix_the_content_format(user: list[dict[str, Any]]) -> None:
    assert renderer("{{ messages[0].content }}").render(user) == "Hi"
    forced = renderer("{{ messages[0].content }}", content_format="openai")
    assert forced.render(user) == "[{'type': 'text', 'text': 'Hi'}]"
    assert forced.content_format() == "openai"
    assert renderer(STYLES["gemma"], content_format="string").content_format() == "string"
