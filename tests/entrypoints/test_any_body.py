"""Whatever a body holds, it is refused as the client's mistake or becomes a request that the engine can be sent."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.entrypoints.http_server import HTTPServer, http_config
from tests.entrypoints.preparer import Preparer
from vllm_clone.config import FrontendConfig
from vllm_clone.engine.input_processor import InputProcessor
from vllm_clone.engine.inputs import TokensPrompt
from vllm_clone.entrypoints.openai.chat import ChatServing
from vllm_clone.entrypoints.openai.completion import CompletionServing
from vllm_clone.entrypoints.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
)
from vllm_clone.entrypoints.openai.serving import RequestHeaders, Serving
from vllm_clone.errors import RequestError
from vllm_clone.sampling_params import SamplingParams

MANY = 200_000
NUMBERS: list[Any] = [
    0, 1, -1, 2, 20, 21, 128, 2048, 49151, 49152, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**70, 10**400, 0.0, 1.5,
    -0.5, 1e308, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
WORDS = ["", "a", "2", "nan", "None", "none", "auto", "left", "text", "json_object", "user", "/", "\0", "é", "x" * 300]
SCALARS = st.sampled_from([None, True, False, *NUMBERS, *WORDS])
KEYS = st.sampled_from([
    "role", "content", "type", "text", "function", "name", "arguments", "json", "include_usage", "json_schema",
    "max_pattern_size", "min_pattern_size", "min_count", "5", "-5", "--5", "1_0", "٥", "99999999", "9" * 5000, "",
])  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


SERVING = Serving(Preparer(), http_config(), FrontendConfig())  # type: ignore[arg-type]
HEADERS = RequestHeaders(None, None)


def run(body: dict[str, Any]) -> None:
    """Refuse the body with an error of its own, or encode what it becomes; anything else is a fault of ours."""
    try:
        if "messages" in body:
            calls = [asyncio.run(ChatServing(SERVING).prepare(ChatCompletionRequest(**body), HEADERS)).request]
        else:
            calls = asyncio.run(CompletionServing(SERVING).prepare(CompletionRequest(**body), HEADERS)).requests
    except (ValidationError, RequestError):
        return
    for request in calls:
        for sequence in request.sequences[:2]:
            msgspec.msgpack.encode(sequence)


def fields(model: Any, *without: str) -> list[str]:
    return [name for name in model.model_fields if name not in without]


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(fields(CompletionRequest, "n")), VALUES, max_size=4))
def test_any_completion(extra: dict[str, Any]) -> None:
    run({"prompt": "Say", "max_tokens": 4, **extra})


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(fields(ChatCompletionRequest, "n")), VALUES, max_size=4))
def test_any_chat(extra: dict[str, Any]) -> None:
    run({"messages": [{"role": "user", "content": "Say"}], "max_tokens": 4, **extra})


MESSAGES = st.dictionaries(
    st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "x"]),
    VALUES | st.sampled_from(["user", "assistant", "system", "tool", "developer"]),
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(st.lists(MESSAGES, max_size=3))
def test_any_conversation(messages: list[dict[str, Any]]) -> None:
    run({"messages": messages, "max_tokens": 4})


@pytest.mark.parametrize("value", NUMBERS, ids=lambda v: str(v)[:20])
@pytest.mark.parametrize("name", fields(CompletionRequest))
def test_every_field_survives_every_number(name: str, value: Any) -> None:
    run({"prompt": "Say", "max_tokens": 4, name: value})


FLOODS = [
    (ChatCompletionRequest, {"messages": [0] * MANY}, 6),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}, 30),
    (ChatCompletionRequest, {"messages": [{"role": "assistant", "tool_calls": [0] * MANY}]}, 12),
    (ChatCompletionRequest, {"messages": [], "tools": [0] * MANY}, 1),
    (ChatCompletionRequest, {"messages": [], "documents": [0] * MANY}, 1),
    (ChatCompletionRequest, {"messages": [], "documents": [{str(i): 0 for i in range(MANY)}]}, 1),
    (CompletionRequest, {"prompt": [{}] * MANY}, 4),
    (CompletionRequest, {"prompt": [[{}] * MANY]}, 4),
    (CompletionRequest, {"prompt": "x", "vllm_xargs": {str(i): {} for i in range(MANY)}}, 1),
    (CompletionRequest, {"prompt": "x", "stop": [0] * MANY}, 2),
    (DetokenizeRequest, {"tokens": [-1] * MANY}, 1),
    (TokenizeChatRequest, {"messages": [0] * MANY}, 6),
    *((CompletionRequest, {"prompt": "x", name: ["a"] * MANY}, 1)
      for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")),
    (CompletionRequest, {"prompt": "x", "bad_words": [0] * MANY}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("model", "body", "most"), FLOODS, ids=[f"{m.__name__}-{list(b)[-1]}" for m, b, _ in FLOODS])
def test_many_wrong_items_are_few_errors(model: Any, body: dict[str, Any], most: int) -> None:
    """Writing down a million errors would stop the server for minutes."""
    with pytest.raises(ValidationError) as caught:
        model(**body)
    assert caught.value.error_count() <= most


def test_many_bad_words_are_refused_before_they_are_tokenized() -> None:
    words = [f"w{i}" for i in range(1000)]
    params = SamplingParams(bad_words=words)
    processor = InputProcessor(http_config(), _NoTokenizer())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"128.*1000"):
        processor.process("id", TokensPrompt([1]), params)


class _NoTokenizer:
    eos_token_id = 1

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise AssertionError("too late")


def test_prompts_times_choices_are_bounded(server: HTTPServer) -> None:
    answer = server.complete(prompt=["x"] * 1024, n=17, temperature=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert "16384" in answer.json()["error"]["message"]


def test_an_error_does_not_repeat_megabytes(server: HTTPServer) -> None:
    for body in (
        {"model": "m" * 3_000_000},
        {"logit_bias": {"k" * 3_000_000: 1}},
        {"truncation_side": "t" * 3_000_000},
    ):
        answer = server.complete(**body)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 10_000


@pytest.mark.parametrize(
    "tools", [5, "abc", [5], [{}], [{"function": None}], [{"function": 5}], [{"function": {"name": ["x"]}}]], ids=str
)
@pytest.mark.parametrize("choice", ["auto", {"function": {"name": "x"}}, {"function": {"name": ["y"]}}], ids=json.dumps)
def test_malformed_tools(server: HTTPServer, tools: Any, choice: Any) -> None:
    assert server.chat(tools=tools, tool_choice=choice).status_code == 400
