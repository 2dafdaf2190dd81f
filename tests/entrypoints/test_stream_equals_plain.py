"""Streamed pieces, put together, are the plain answer: texts, token ids, log-probabilities, usage."""

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from tests.entrypoints.http_server import HTTPServer

COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"logprobs": 0, "echo": True},
    {"logprobs": 2, "echo": True, "prompt": ["a b", "c d e"]},
    {"logprobs": 1, "echo": True, "n": 2, "temperature": 1},
    {"logprobs": 1, "echo": True, "return_token_ids": True},
    {"logprobs": 1, "echo": True, "max_tokens": 0},
    {"echo": True, "max_tokens": 0},
    {"logprobs": 1, "stream_interval": 3},
    {"logprobs": 1, "stop": ["three"]},
    {"logprobs": 1, "stop": ["two"], "include_stop_str_in_output": True},
    {"logprobs": 1, "echo": True, "return_tokens_as_token_ids": True},
    {"logprobs": 2, "logprob_token_ids": [5, 6]},
    {"return_token_ids": True, "prompt": [[504, 3575], [282]], "n": 2, "temperature": 1},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 3, "temperature": 1, "return_token_ids": True},
    {"stop": ["three"], "logprobs": True},
    {"echo": True, "add_generation_prompt": False, "continue_final_message": True,
     "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "And "}]},
]  # fmt: skip
WORDS = [" one two three four", " five six seven", " eight nine", " ten"]


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    *blocks, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(b.removeprefix("data: ")) for b in blocks]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for one in lists for item in one]


def without_counts_of_caching(usage: dict[str, Any]) -> dict[str, int]:
    return {k: v for k, v in usage.items() if k.endswith("_tokens")}


@pytest.mark.parametrize("body", COMPLETIONS, ids=json.dumps)
def test_completions(server: HTTPServer, body: dict[str, Any]) -> None:
    server.choices_per_prompt = body.get("n", 1)
    server.say(*WORDS)
    asked = {"max_tokens": 4, **body}
    plain = server.complete(**asked).json()
    *pieces, last = chunks(server.complete(**asked, stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert without_counts_of_caching(last["usage"]) == without_counts_of_caching(plain["usage"])
    for choice in plain["choices"]:
        own = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == choice["index"]]
        assert "".join(o["text"] for o in own) == choice["text"]
        assert [o["finish_reason"] for o in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        assert joined(o["token_ids"] or [] for o in own) == (choice["token_ids"] or [])
        if body.get("return_token_ids"):
            assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for part, values in (choice["logprobs"] or {}).items():
            assert joined(o["logprobs"][part] for o in own if o["logprobs"]) == values


@pytest.mark.parametrize("body", CHATS, ids=json.dumps)
def test_chat(server: HTTPServer, body: dict[str, Any]) -> None:
    server.say(*WORDS)
    asked = {"max_tokens": 4, **body}
    plain = server.chat(**asked).json()
    *pieces, last = chunks(server.chat(**asked, stream=True, stream_options={"include_usage": True}))
    assert without_counts_of_caching(last["usage"]) == without_counts_of_caching(plain["usage"])
    for choice in plain["choices"]:
        own = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == choice["message"]["role"]
        assert "".join(o["delta"].get("content", "") for o in own) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert joined(o.get("token_ids") or [] for o in own) == (choice["token_ids"] or [])
        if choice["logprobs"]:
            streamed = joined(o["logprobs"]["content"] for o in own if o["logprobs"])
            assert streamed == choice["logprobs"]["content"]
