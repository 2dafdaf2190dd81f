"""One line through the server's own application."""

import json

import pytest

from vllm_clone.entrypoints.batch.requests import run_line


@pytest.fixture
def answer(server):
    def run(line, max_bytes: int = 10**6):
        raw = line if isinstance(line, bytes) else json.dumps(line).encode()
        outcome = server.run(run_line(server.app, "vllm-0", raw, max_bytes))
        result = json.loads(outcome.line)
        assert list(result) == ["id", "custom_id", "response", "error"]
        assert result["response"]["status_code"] == outcome.status
        assert (result["error"] is None) == (outcome.status == 200)
        return outcome, result

    return run


def line(url: str = "/v1/completions", **body) -> dict:
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"prompt": "Say", "max_tokens": 3, **body}}


def test_an_answer_is_the_servers_own_and_its_tokens_are_counted(answer):
    outcome, result = answer(line())
    assert result["response"]["body"]["object"] == "text_completion"
    assert (result["custom_id"], outcome.completion_tokens) == ("a", 3)
    assert outcome.prompt_tokens == result["response"]["body"]["usage"]["prompt_tokens"] > 0


def test_chat_and_tokenize_work(answer):
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}}
    chat["body"]["max_tokens"] = 2
    assert answer(chat)[1]["response"]["body"]["object"] == "chat.completion"
    assert answer(line("/tokenize"))[1]["response"]["body"]["count"] > 0


@pytest.mark.parametrize("body", [{"model": "nope"}, {"temperature": -3}, {"max_tokens": "x"}, {"n": 0}])
def test_a_wrong_request_gets_the_error_that_http_gives(answer, server, body):
    _, result = answer(line(**body))
    http = server.client.post("/v1/completions", json=line(**body)["body"])
    assert (result["response"]["status_code"], result["error"]) == (http.status_code, http.json())
    assert result["response"]["body"] is None


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"custom_id": "b\\n", oops', "b\n"),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b'{"custom_id": "d", "method": "POST", "url": "/v1/completions"}', "d"),
        (b'{"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {}}', None),
    ],
)
def test_a_malformed_line_is_an_error_line_with_its_name_where_that_can_be_read(answer, raw, name):
    outcome, result = answer(raw)
    assert (outcome.status, result["custom_id"]) == (400, name)
    assert "is no request" in result["error"]["error"]["message"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [("/v1/embeddings", "pooling"), ("/v2/rerank", "pooling"), ("/v1/audio/translations", "audio"), ("/x", "no end")],
)
def test_a_url_that_cannot_be_served_says_why(answer, url, reason):
    outcome, result = answer(line(url))
    assert outcome.status == 400
    assert reason in result["error"]
    assert "/v1/chat/completions" in result["error"]


@pytest.mark.parametrize("stream", [True, 1, "true"])
def test_streams_are_refused(answer, stream):
    outcome, result = answer(line(stream=stream))
    assert outcome.status == 400
    assert "cannot be streamed" in result["error"]


def test_a_line_over_the_limit_is_refused(answer):
    assert "exceeds 10 bytes" in answer(line(), 10)[1]["error"]["error"]["message"]
