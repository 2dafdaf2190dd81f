"""The official OpenAI client against the real application."""

from collections.abc import Iterator

import openai
import pytest

from tests.entrypoints.http_server import HTTPServer

MESSAGES = [{"role": "user", "content": "Say hi."}]


@pytest.fixture(scope="module")
def client(server: HTTPServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completion_of_two_prompts(client: openai.OpenAI, server: HTTPServer):
    server.say(" one two", " three four")
    answer = client.completions.create(model="smollm2", prompt=["Count:", "Go on:"], max_tokens=2, temperature=0)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, " one two", "length"), (1, " three four", "length"),
    ]  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


def test_streamed_completion_adds_up_to_the_plain_one(client: openai.OpenAI, server: HTTPServer):
    server.say(" one, two, three, four")
    plain = client.completions.create(model="smollm2", prompt="Count:", max_tokens=8, temperature=0)
    chunks = list(client.completions.create(model="smollm2", prompt="Count:", max_tokens=8, temperature=0, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == plain.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 7 + ["length"]
    assert len({c.id for c in chunks}) == 1


def test_streamed_chat_with_usage(client: openai.OpenAI, server: HTTPServer):
    server.say("Hi there")
    stream = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=2, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hi there"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2


def test_several_choices(client: openai.OpenAI, server: HTTPServer):
    server.say(" one", " two", " three")
    answer = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=1, n=3, temperature=1)
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, " one"), (1, " two"), (2, " three")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_several_streamed_choices(client: openai.OpenAI, server: HTTPServer):
    server.say(" one two", " three four")
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(
        model="smollm2", prompt="Count:", max_tokens=2, n=2, temperature=1, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: " one two", 1: " three four"}


def test_chat_logprobs(client: openai.OpenAI, server: HTTPServer):
    server.say("é!")
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=2, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert (
        bytes(b for t in logprobs.content for b in t.bytes or ())
        .decode()
        .startswith(answer.choices[0].message.content or "-")
    )
    for token in logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token


def test_echo_with_logprobs_covers_the_prompt(client: openai.OpenAI, server: HTTPServer):
    server.say(" Paris")
    answer = client.completions.create(
        model="smollm2", prompt="The capital is", max_tokens=1, temperature=0, echo=True, logprobs=0
    )
    choice = answer.choices[0]
    assert choice.text == "The capital is Paris"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [0, 3, 11, 14]


def test_stop_strings_cut_the_text(client: openai.OpenAI, server: HTTPServer):
    server.say(" one, two, three")
    answer = client.completions.create(model="smollm2", prompt="Count:", max_tokens=9, temperature=0, stop=[", three"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" one, two", "stop")


def test_models_and_errors(client: openai.OpenAI):
    assert [m.id for m in client.models.list()] == ["smollm2"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nope", prompt="x")
    assert caught.value.body == {
        "message": caught.value.body["message"], "type": "NotFoundError", "param": "model", "code": 404,
    }  # type: ignore[index]  # fmt: skip
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="smollm2", prompt="x", temperature=3)
