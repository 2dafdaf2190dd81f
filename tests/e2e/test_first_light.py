"""The real model behind the real server, through the clients people use."""

import subprocess
import sys

from tests.e2e.server import SERVED_NAME, Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_openai_client_gets_paris(smollm2: Server) -> None:
    reply = smollm2.client().chat.completions.create(model=SERVED_NAME, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in reply.choices[0].message.content
    assert reply.usage.completion_tokens <= 32
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_a_stream_says_the_same_as_a_plain_answer(smollm2: Server) -> None:
    client = smollm2.client()
    options = {"model": SERVED_NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    plain = client.chat.completions.create(**options)
    stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == plain.choices[0].message.content
    assert stream[-1].usage.completion_tokens == plain.usage.completion_tokens
    finish = [c.choices[0].finish_reason for c in stream if c.choices and c.choices[0].finish_reason]
    assert finish == [plain.choices[0].finish_reason]


def test_a_seed_gives_one_answer_alone_and_in_company(smollm2: Server) -> None:
    client = smollm2.client()
    options = {"model": SERVED_NAME, "prompt": "Once upon a time", "temperature": 1.0, "max_tokens": 24}
    alone = client.completions.create(**options, seed=7).choices[0].text
    three = client.completions.create(**options, seed=7, n=3)
    assert three.choices[0].text == alone
    assert len({c.text for c in three.choices}) == 3
    again = client.completions.create(**options, seed=8).choices[0].text
    assert three.choices[1].text == again


def test_vllm_chat_prints_the_answer_and_its_speed(smollm2: Server) -> None:
    command = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main", "chat", "--url", smollm2.url + "/v1"]
    done = subprocess.run(
        [*command, "-q", "What is the capital of France?", "--stats"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"Using model: {SERVED_NAME}"
    assert len(lines) > 3  # what it says is sampled
    assert lines[-2].startswith("TTFT: ")
    assert lines[-2].endswith(" ms")
    assert lines[-1].startswith("TPS:  ")


def test_vllm_complete_continues_each_line_of_its_input(smollm2: Server) -> None:
    command = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main", "complete", "--url", smollm2.url + "/v1"]
    done = subprocess.run(
        [*command, "--max-tokens", "4"], input="The sky is\nOne, two,\n", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("> ") == 3


def test_a_client_without_a_server_is_told_so_in_one_line() -> None:
    command = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main", "chat", "--url", "http://127.0.0.1:9/v1"]
    done = subprocess.run([*command, "-q", "Hi"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "http://127.0.0.1:9/v1" in done.stderr
