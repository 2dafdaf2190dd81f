"""What `vllm chat` and `vllm complete` share: a streaming client of any OpenAI-compatible server."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import openai

from vllm_clone import envs

THINK_OPEN, THINK_CLOSE = "<think>\n", "\n</think>\n"
TROUBLE = (openai.OpenAIError, json.JSONDecodeError)
"""What a server, or the lack of one, can cause."""


@dataclass(slots=True)
class Delta:
    """One streamed piece of an answer; ``reasoning`` is shown but never sent back."""

    text: str = ""
    reasoning: str = ""
    completion_tokens: int | None = None


@dataclass(slots=True)
class Answer:
    """A finished answer. Times are in seconds; ``completion_tokens`` is None when the server did not say."""

    text: str
    seconds_to_first: float | None
    seconds: float
    completion_tokens: int | None


def fail(message: str) -> NoReturn:
    """End the program with one line on stderr and exit code 1."""
    _complain(message)
    raise SystemExit(1)


def explain(error: Exception, url: str) -> str:
    """One line that tells a person what went wrong and, where we know it, what to do."""
    if isinstance(error, openai.APIConnectionError):
        return f"no answer from {url}; is a server running there (vllm serve MODEL), or did you mean another --url?"
    if isinstance(error, json.JSONDecodeError):
        return _not_the_api(url)
    if isinstance(error, openai.AuthenticationError):
        return f"{url} refused the API key; give it with --api-key or OPENAI_API_KEY."
    if isinstance(error, openai.APIStatusError):
        body = error.body
        message = body.get("message") if isinstance(body, dict) else None
        return f"HTTP {error.status_code}: {message or error.message}"
    return str(error)


def connect(args: argparse.Namespace) -> tuple[openai.OpenAI, str]:
    """A client and the name of the model to use.

    Raises:
        SystemExit: 1 when the server cannot be reached or serves no model.
    """
    key = args.api_key or envs.OPENAI_API_KEY or "EMPTY"
    if not (key.isascii() and key.isprintable()):
        fail("--api-key or OPENAI_API_KEY: a key is one line of ASCII characters.")
    client = openai.OpenAI(api_key=key, base_url=args.url, max_retries=0)
    name = args.model_name
    if name is None:
        try:
            # As it came: the client library breaks when a 200 is some web page.
            answer = json.loads(client.models.with_raw_response.list().http_response.content)
        except (*TROUBLE, UnicodeDecodeError) as error:
            fail(explain(error, args.url))
        name = _first_model(answer, args.url)
    print(f"Using model: {name}")
    return client, name


def _first_model(answer: Any, url: str) -> str:
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in models):
        fail(_not_the_api(url))
    if not models:
        fail(f"{url} serves no model.")
    return str(models[0]["id"])


def chat_deltas(stream: Iterable[Any]) -> Iterator[Delta]:
    """Text, reasoning and usage out of a chat completion stream."""
    for chunk in stream:
        delta = Delta(completion_tokens=chunk.usage.completion_tokens if chunk.usage else None)
        if chunk.choices:
            piece = chunk.choices[0].delta
            delta.text = piece.content or ""
            delta.reasoning = getattr(piece, "reasoning", None) or getattr(piece, "reasoning_content", None) or ""
        yield delta


def completion_deltas(stream: Iterable[Any]) -> Iterator[Delta]:
    """Text and usage out of a completion stream."""
    for chunk in stream:
        text = chunk.choices[0].text if chunk.choices else ""
        yield Delta(text=text, completion_tokens=chunk.usage.completion_tokens if chunk.usage else None)


def show(deltas: Iterable[Delta], clock: Callable[[], float] = time.perf_counter) -> Answer:
    """Print an answer as it arrives, a newline after it, and return it whole."""
    start, first, tokens = clock(), None, None
    pieces: list[str] = []
    thinking = False
    try:
        for delta in deltas:
            if first is None and (delta.text or delta.reasoning):
                first = clock()
            if delta.reasoning:
                _write(("" if thinking else THINK_OPEN) + delta.reasoning)
                thinking = True
            if delta.text:
                _write((THINK_CLOSE if thinking else "") + delta.text)
                thinking = False
                pieces.append(delta.text)
            tokens = delta.completion_tokens if delta.completion_tokens is not None else tokens
    finally:  # a broken answer must not run into the line that says why
        _write((THINK_CLOSE if thinking else "") + "\n")
    return Answer("".join(pieces), None if first is None else first - start, clock() - start, tokens)


def print_stats(answer: Answer) -> None:
    """Time to first token and tokens per second over the whole answer; nothing when no token arrived."""
    if answer.seconds_to_first is None or not answer.completion_tokens:
        return
    print(f"TTFT: {answer.seconds_to_first * 1e3:.2f} ms")
    rate = answer.completion_tokens / answer.seconds
    print(f"TPS:  {rate:.2f} tokens/s ({answer.completion_tokens} tokens in {answer.seconds:.2f}s)")


def converse(turn: Callable[[str], None], quick: str | None, instruction: str, url: str) -> int:
    """Run one turn (``quick``) or read turns from the terminal until end of input.

    An error ends a quick run with exit code 1; in a session it is shown and the session goes on.
    Ctrl-C ends the program with exit code 0, as vLLM does.
    """
    try:
        if quick is not None:
            try:
                turn(quick)
            except TROUBLE as error:
                fail(explain(error, url))
            return 0
        print(instruction)
        while True:
            try:
                text = input("> ")
            except EOFError:
                print()
                return 0
            try:
                turn(text)
            except TROUBLE as error:
                _complain(explain(error, url))
    except KeyboardInterrupt:
        print()
        return 0


def usage_option(wanted: bool) -> dict[str, Any]:
    """Request fields that make a stream end with its token counts."""
    return {"stream_options": {"include_usage": True}} if wanted else {}


def _not_the_api(url: str) -> str:
    return f"{url} does not answer as the OpenAI API does; the URL of a vllm server ends in /v1."


def _complain(message: str) -> None:
    sys.stdout.flush()
    print(f"vllm: error: {' '.join(message.split())}", file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
