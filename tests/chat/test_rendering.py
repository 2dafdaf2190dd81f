"""Prompts equal those of transformers, template by template."""

import datetime
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.chat.conftest import SPECIAL, renderer
from tests.chat.styles import CALL, CHATML, CONVERSATIONS, LLAMA3, MISTRAL, QWEN, STYLES, TOOLS
from tests.hub.gguf_bytes import smollm2
from vllm_clone.chat import ChatRenderer, load_template
from vllm_clone.errors import ConfigError, RequestError
from vllm_clone.tokenizers import get_tokenizer


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """What transformers renders; raises what it raises."""
    rendered, _ = render_jinja_template([messages], chat_template=template, **SPECIAL, **options)
    return str(rendered[0])


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("style", STYLES)
def test_a_style_renders_as_in_transformers(style: str, conversation: str, prompt: bool) -> None:
    template, messages = STYLES[style], CONVERSATIONS[conversation]
    try:
        expected = theirs(template, messages, add_generation_prompt=prompt)
    except jinja2.TemplateError as error:
        with pytest.raises(RequestError, match=re.escape(str(error))):
            renderer(template).render(messages, add_generation_prompt=prompt)
    else:
        assert renderer(template).render(messages, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("style", STYLES)
def test_a_style_continues_a_message_as_in_transformers(style: str, conversation: str) -> None:
    template, messages = STYLES[style], CONVERSATIONS[conversation]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        expected = theirs(template, messages, **options)
    except (jinja2.TemplateError, ValueError):
        with pytest.raises(RequestError):
            renderer(template).render(messages, **options)
    else:
        assert renderer(template).render(messages, **options) == expected


@pytest.mark.parametrize("style", ["llama3", "qwen"])
def test_tools_calls_and_results_render_as_in_transformers(style: str) -> None:
    parsed = {**CALL, "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    judged = [messages[0], {**messages[1], "tool_calls": [parsed]}, messages[2]]
    ours = renderer(STYLES[style]).render(messages, tools=TOOLS)
    assert ours == theirs(STYLES[style], judged, tools=TOOLS, add_generation_prompt=True)
    assert "Zürich" in ours
    assert "<Städte>" in ours


def test_documents_reach_the_template(user: list[dict[str, Any]]) -> None:
    documents = [{"title": "T", "text": "x"}]
    assert renderer(STYLES["training"]).render(user, documents=documents) == "Hi[T: x]"


def test_smollm2_renders_its_known_prompt() -> None:
    tokenizer = get_tokenizer(str(smollm2()))
    chat = ChatRenderer(tokenizer)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    messages = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hel"}]
    text = chat.render(messages, add_generation_prompt=False, continue_final_message=True)
    start = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    assert text == start + "Hel"
    assert chat.render(messages[:1]) == start
    assert tokenizer.encode(text, add_special_tokens=False) == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
        198, 1, 4093, 198, 36218, 15876, 30, 2, 198, 1, 520, 9531, 198, 11653,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "count", "options"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi."}]}], 34, {}),
        ([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}], 18, {}),
        (
            [
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            ],
            45,
            {},
        ),
        ([{"role": "user"}], 30, {}),
        (
            [{"role": "user", "content": "Say hi."}],
            27,
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ],
)
def test_smollm2_prompts_have_the_known_lengths(
    messages: list[dict[str, Any]], count: int, options: dict[str, Any]
) -> None:
    tokenizer = get_tokenizer(str(smollm2()))
    text = ChatRenderer(tokenizer).render(messages, **options)
    assert len(tokenizer.encode(text, add_special_tokens=False)) == count


# ---- continuing a message ----


@pytest.mark.parametrize("text", ["end", "im", "|", "\n", "a ", " a", "", "assistant", "<|im_end|>"])
def test_the_cut_is_at_the_messages_end_not_where_its_text_also_occurs(text: str) -> None:
    messages = [{"role": "user", "content": "end"}, {"role": "assistant", "content": text}]
    prompt = renderer(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\n" + text)


def test_a_list_of_parts_continues_after_its_last_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert renderer(STYLES["gemma"]).render(messages, **options).endswith("<start_of_turn>model\nab")
    assert renderer(CHATML).render(messages, **options).endswith("assistant\na\nb")


def test_both_endings_at_once_are_refused(user: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="cannot both be true"):
        renderer(CHATML).render(user, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize("template", ["{{ messages[0].role }}", "{{ messages[-1].content | upper }}", "x"])
def test_a_template_that_drops_or_changes_the_text_cannot_continue_it(
    template: str, user: list[dict[str, Any]]
) -> None:
    with pytest.raises(RequestError, match="continue_final_message"):
        renderer(template).render(user, add_generation_prompt=False, continue_final_message=True)


# ---- which template ----


def test_a_model_without_template_says_what_to_do(user: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="has no chat template; start the server with --chat-template") as caught:
        renderer(None).render(user)
    assert (caught.value.kind, caught.value.param) == ("invalid", None)
    with pytest.raises(RequestError, match="has no chat template"):
        renderer({"rag": "x"}).render(user)


def test_the_requests_template_wins_over_the_operators_and_that_over_the_models(user: list[dict[str, Any]]) -> None:
    assert renderer("model").render(user) == "model"
    assert renderer("model", "operator").render(user) == "operator"
    assert renderer("model", "operator").render(user, chat_template="request") == "request"


def test_a_template_for_tools_is_used_with_tools(user: list[dict[str, Any]]) -> None:
    chat = renderer({"default": "plain", "tool_use": "tools", "rag": "documents"})
    assert chat.render(user) == "plain"
    assert chat.render(user, tools=TOOLS) == "tools"
    assert chat.render(user, chat_template="rag") == "documents"
    assert renderer({"default": "plain"}).render(user, tools=TOOLS) == "plain"


def test_the_operators_template_is_a_file_or_itself(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ 'é' }}\n")
    assert load_template(None) is None
    assert load_template(str(file)) == "{{ 'é' }}\n"
    assert load_template("{{ messages }}") == "{{ messages }}"
    assert load_template(r"{{ a }}\n{{ b }}") == "{{ a }}\n{{ b }}"
    with pytest.raises(ConfigError, match=r"--chat-template no-such\.jinja: No such file"):
        load_template("no-such.jinja")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_template(str(tmp_path / "bytes"))


# ---- variables ----


def test_kwargs_reach_the_template_and_unknown_ones_do_no_harm(user: list[dict[str, Any]]) -> None:
    kwargs = {"enable_thinking": False, "self": 1, "loop": 2, "foo": {"bar": [1]}, "context": 3}
    assert renderer(QWEN).render(user, chat_template_kwargs=kwargs).endswith("<think>\n\n</think>\n\n")


def test_kwargs_cannot_replace_the_conversation(user: list[dict[str, Any]]) -> None:
    kwargs = {"messages": [], "tools": [1], "add_generation_prompt": False, "tokenize": True, "documents": 1}
    template = "{{ messages|length }}{{ tools }}{{ add_generation_prompt }}{{ tokenize is defined }}{{ documents }}"
    assert renderer(template).render(user, chat_template_kwargs=kwargs) == "1NoneTrueFalseNone"


def test_kwargs_may_replace_special_tokens(user: list[dict[str, Any]]) -> None:
    assert renderer("{{ bos_token }}{{ eos_token }}").render(user, chat_template_kwargs={"bos_token": "B"}) == "B</s>"


def test_the_date_is_todays(user: list[dict[str, Any]]) -> None:
    before = datetime.date.today()
    rendered = renderer("{{ strftime_now('%Y-%m-%d') }}").render(user)
    assert rendered in {str(before), str(datetime.date.today())}


def test_a_message_is_the_callers_own_and_stays_as_it_is() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [CALL]}]
    copy = [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [dict(CALL)]}]
    for template in (CHATML, STYLES["gemma"]):
        renderer(template).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == copy


# ---- templates that refuse or are wrong ----


def test_what_a_template_says_reaches_the_client() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RequestError, match="Roles must alternate"):
        renderer(MISTRAL).render(twice)
    calls = [{"role": "assistant", "tool_calls": [CALL, CALL]}]
    with pytest.raises(RequestError, match="only supports single tool-calls"):
        renderer(LLAMA3).render([{"role": "user", "content": "x"}, *calls])


@pytest.mark.parametrize(
    "template", ["{% for", "{{ x | no_such_filter }}", "{% endfor %}", "{{ messages.a.b }}", "{{ 1 / 0 }}",
                 "{% include 'x' %}", "{{ '(' * 3 }}{{ no_such() }}"]
)  # fmt: skip
def test_a_broken_template_is_the_requests_error(template: str, user: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="The chat template ") as caught:
        renderer(template).render(user)
    assert caught.value.param is None
