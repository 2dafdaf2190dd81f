"""`vllm chat` and `vllm complete` against any OpenAI-compatible server."""

import builtins
import socket
from collections.abc import Iterator

import pytest

from tests.cli.fake_openai import FakeOpenAI, running
from vllm_clone.entrypoints.cli.main import main
from vllm_clone.entrypoints.cli.openai_client import Delta, show

ASK = "Please enter a message for the chat model:"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOpenAI]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with running() as fake:
        yield fake


@pytest.fixture
def client(server, capsys, monkeypatch):
    """Run a client with these lines typed: (lines on stdout, stderr, exit code)."""

    def run(*argv: str, typed: tuple[str | type[BaseException], ...] = (), url: str | None = None):
        lines = iter([*typed, EOFError])

        def read(prompt: str) -> str:
            line = next(lines)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(builtins, "input", read)
        try:
            code = main([*argv, "--url", server.url if url is None else url])
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return out.splitlines(), err, code

    return run


def test_a_quick_message_prints_the_model_and_the_answer(client, server):
    assert client("chat", "-q", "Hi") == (["Using model: first", "Hello there"], "", 0)
    assert server.asked == [{"model": "first", "messages": [{"role": "user", "content": "Hi"}], "stream": True}]


def test_a_quick_prompt_is_continued(client, server):
    assert client("complete", "-q", "Say", "--max-tokens", "5") == (["Using model: first", "Hello there"], "", 0)
    assert server.asked == [{"model": "first", "prompt": "Say", "max_tokens": 5, "stream": True}]


def test_without_max_tokens_the_server_decides(client, server):
    client("complete", "-q", "Say")
    assert server.asked == [{"model": "first", "prompt": "Say", "stream": True}]


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_the_model_may_be_named(client, server, command):
    out, _, _ = client(command, "-q", "Hi", "--model-name", "second")
    assert out[0] == "Using model: second"
    assert server.asked[0]["model"] == "second"
    assert len(server.keys) == 1  # it does not ask which models there are


def test_a_conversation_sends_all_that_was_said_before(client, server):
    out, err, code = client("chat", "--system-prompt", "Be brief.", typed=("One", "Two"))
    assert (out, err, code) == (["Using model: first", ASK, "Hello there", "Hello there", ""], "", 0)
    assert [m["role"] for m in server.asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in server.asked[1]["messages"]] == ["Be brief.", "One", "Hello there", "Two"]


def test_an_empty_system_prompt_is_one(client, server):
    client("chat", "--system-prompt", "", "-q", "Hi")
    assert server.asked[0]["messages"][0] == {"role": "system", "content": ""}


def test_completions_know_nothing_of_each_other(client, server):
    client("complete", typed=("One", "Two"))
    assert [asked["prompt"] for asked in server.asked] == ["One", "Two"]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_shown_between_marks_and_not_sent_back(client, server, field):
    server.deltas = [{"role": "assistant"}, {field: "Hm"}, {field: "m."}, {"content": "Yes"}, {"content": "!"}]
    out, _, _ = client("chat", typed=("One", "Two"))
    assert out[2:7] == ["<think>", "Hmm.", "</think>", "Yes!", "<think>"]
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "Yes!"}


def test_reasoning_that_leads_to_no_answer_is_closed_too(client, server):
    server.deltas = [{"reasoning": "Hm"}]
    assert client("chat", "-q", "Hi")[0][1:] == ["<think>", "Hm", "</think>", ""]


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_stats_follow_each_answer(client, server, command):
    out, _, code = client(command, "-q", "Hi", "--stats")
    assert code == 0
    assert out[1] == "Hello there"
    assert out[2].startswith("TTFT: ")
    assert out[2].endswith(" ms")
    assert out[3].startswith("TPS:  ")
    assert "(2 tokens in " in out[3]
    assert server.asked[0]["stream_options"] == {"include_usage": True}


def test_an_answer_without_tokens_has_no_stats(client, server):
    server.deltas, server.completion_tokens = [{"role": "assistant"}], 0
    assert client("chat", "-q", "Hi", "--stats")[0] == ["Using model: first", ""]


def test_times_count_from_the_request_to_the_first_token_and_to_the_end():
    times = iter([10.0, 10.5, 12.0])
    answer = show([Delta(), Delta(text="a"), Delta(text="b"), Delta(completion_tokens=7)], clock=lambda: next(times))
    assert (answer.text, answer.seconds_to_first, answer.seconds, answer.completion_tokens) == ("ab", 0.5, 2.0, 7)


# ---- keys ----


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_the_key_comes_from_the_flag_else_from_the_environment(client, server, monkeypatch, command):
    client(command, "-q", "Hi")
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    client(command, "-q", "Hi")
    client(command, "-q", "Hi", "--api-key", "from-flag")
    assert server.keys[::2] == server.keys[1::2] == ["Bearer EMPTY", "Bearer from-env", "Bearer from-flag"]


# ---- trouble ----


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_no_server_is_one_line_with_a_remedy(client, command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        out, err, code = client(command, "-q", "Hi", url=url)
    assert (out, code) == ([], 1)
    assert err == (
        f"vllm: error: no answer from {url}; is a server running there (vllm serve MODEL), or did you mean another "
        "--url?\n"
    )


@pytest.mark.parametrize("url", ["", "nonsense", "http://[", "ftp://127.0.0.1/v1", "http://127.0.0.1:99999/v1"])
def test_a_wrong_url_is_named(client, url):
    out, err, code = client("chat", "-q", "Hi", url=url)
    assert (out, code) == ([], 1)
    assert err.startswith(f"vllm: error: no answer from {url};")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "page", ["<html>Welcome</html>", '{"hello": 1}', '{"data": [{"name": "x"}]}', '{"data": [', "\xff"]
)
def test_a_server_of_something_else_is_told_from_ours(client, server, page):
    server.page = page
    line = f"vllm: error: {server.url} does not answer as the OpenAI API does; the URL of a vllm server ends in /v1.\n"
    assert client("chat", "-q", "Hi") == ([], line, 1)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_no_header_can_carry_is_refused(client, key):
    line = "vllm: error: --api-key or OPENAI_API_KEY: a key is one line of ASCII characters.\n"
    assert client("chat", "-q", "Hi", "--api-key", key) == ([], line, 1)


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize(
    ("end", "line"),
    [
        ('data: {"error": {"message": "The engine has stopped.", "code": 500}}\n\n', "The engine has stopped."),
        ('data: {"a": \n\n', "{url} does not answer as the OpenAI API does; the URL of a vllm server ends in /v1."),
    ],
)
def test_an_error_in_mid_answer_stands_on_a_line_of_its_own(client, server, command, end, line):
    server.stream_end = end
    out, err, code = client(command, "-q", "Hi")
    assert (out[1:], code) == (["Hello there"], 1)
    assert err == f"vllm: error: {line.format(url=server.url)}\n"


def test_a_server_without_models_is_named(client, server):
    server.models = []
    assert client("chat", "-q", "Hi") == ([], f"vllm: error: {server.url} serves no model.\n", 1)


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize(
    ("failure", "line"),
    [
        ((404, "The model `x` does not exist."), "HTTP 404: The model `x` does not exist."),
        ((503, "Too many\nrequests."), "HTTP 503: Too many requests."),
        ((401, "Unauthorized"), "{url} refused the API key; give it with --api-key or OPENAI_API_KEY."),
    ],
)
def test_a_refused_quick_request_ends_with_1(client, server, command, failure, line):
    server.failures = [failure]
    _, err, code = client(command, "-q", "Hi")
    assert (err, code) == (f"vllm: error: {line.format(url=server.url)}\n", 1)


def test_in_a_conversation_an_error_is_shown_and_the_talk_goes_on_without_the_failed_turn(client, server):
    server.failures = [(400, "This is too long.")]
    out, err, code = client("chat", typed=("One", "Two"))
    assert (out[2:], code) == (["Hello there", ""], 0)
    assert err == "vllm: error: HTTP 400: This is too long.\n"
    assert [m["content"] for m in server.asked[1]["messages"]] == ["Two"]


def test_ctrl_c_ends_the_talk_quietly(client):
    assert client("chat", typed=(KeyboardInterrupt,)) == (["Using model: first", ASK, ""], "", 0)
