"""The protocols a server may speak: how a sample is worded, and what an answer's events mean."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_clone.benchmarks.serve.sample import Sample

Body = dict[str, Any]


@dataclass(slots=True)
class Event:
    """What one event of a stream says.

    Attributes:
        has_token: it counts as the arrival of output.
        prompt_len, output_len: token counts, where the event has them.
        error: why the server gave up.
        is_end: the event without which a stream of this protocol is not whole.
    """

    has_token: bool = False
    text: str = ""
    prompt_len: int | None = None
    output_len: int | None = None
    error: str | None = None
    is_end: bool = False


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None
    error: Any = None


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    delta: Any = None
    response: _Response | None = None
    message: str | None = None


class _TGIToken(msgspec.Struct):
    text: str = ""


class _TGIDetails(msgspec.Struct):
    generated_tokens: int | None = None


class _TGIEvent(msgspec.Struct):
    token: _TGIToken | None = None
    details: _TGIDetails | None = None
    error: str | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode
_response_event = msgspec.json.Decoder(_ResponseEvent).decode
_tgi_event = msgspec.json.Decoder(_TGIEvent).decode
_NO_USAGE = _Usage()


def _read_chunk(payload: bytes) -> Event:
    chunk = _chunk(payload)
    if chunk.choices:
        choice = chunk.choices[0]
        text = choice.text
        if text is None and choice.delta is not None:
            delta = choice.delta
            text = delta.content or delta.reasoning or delta.reasoning_content
        event = Event(True, text or "")
    else:
        event = Event()
    if chunk.usage is not None:
        event.prompt_len, event.output_len = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
    if chunk.error:
        event.error = _message(chunk.error)
    return event


def _read_response_event(payload: bytes) -> Event:
    event = _response_event(payload)
    if event.type in ("response.output_text.delta", "response.reasoning_text.delta"):
        return Event(True, event.delta if isinstance(event.delta, str) else "")
    if event.type in ("response.completed", "response.incomplete"):
        usage = (event.response.usage if event.response else None) or _NO_USAGE
        return Event(prompt_len=usage.input_tokens, output_len=usage.output_tokens, is_end=True)
    if event.type in ("response.failed", "error"):
        cause = event.response.error if event.response else event.message
        return Event(error=_message(cause) or event.type)
    return Event()


def _read_tgi_event(payload: bytes) -> Event:
    event = _tgi_event(payload)
    count = event.details.generated_tokens if event.details else None
    return Event(event.token is not None, event.token.text if event.token else "", output_len=count, error=event.error)


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "")


def error_message(body: bytes) -> str:
    """The sentence in the body of an answer that is an error; '' when it has none."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return ""
    if not isinstance(answer, dict):
        return ""
    return _message(answer.get("error") or answer.get("detail") or answer.get("message"))


def reply_prompt_len(body: bytes) -> int | None:
    """Prompt tokens that a whole reply reports."""
    try:
        usage = msgspec.json.decode(body, type=_Response).usage
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return (usage.prompt_tokens if usage.prompt_tokens is not None else usage.total_tokens) if usage else None


_STREAM: Body = {"stream": True, "stream_options": {"include_usage": True}}


def _completion(sample: Sample, logprobs: int | None) -> Body:
    body = {"prompt": sample.prompt, "repetition_penalty": 1.0, "max_tokens": sample.output_len, **_STREAM}
    return body if logprobs is None else body | {"logprobs": logprobs}


def _messages(sample: Sample) -> list[Body]:
    return [{"role": "user", "content": sample.prompt}]


def _chat(sample: Sample, logprobs: int | None) -> Body:
    body = {"messages": _messages(sample), "max_completion_tokens": sample.output_len, **_STREAM}
    return body if logprobs is None else body | {"logprobs": True, "top_logprobs": logprobs}


def _responses(sample: Sample, logprobs: int | None) -> Body:
    return {"input": sample.prompt, "max_output_tokens": sample.output_len, "stream": True, "store": False}


def _tgi(sample: Sample, logprobs: int | None) -> Body:
    return {"inputs": sample.prompt, "parameters": {"max_new_tokens": sample.output_len, "details": True}}


def _embeddings(sample: Sample, logprobs: int | None) -> Body:
    return {"input": sample.prompt, "truncate_prompt_tokens": -1}


def _embeddings_chat(sample: Sample, logprobs: int | None) -> Body:
    return {"messages": _messages(sample), "truncate_prompt_tokens": -1}


def _plain_input(sample: Sample, logprobs: int | None) -> Body:
    return {"input": sample.prompt}


@dataclass(frozen=True, slots=True)
class Backend:
    """A protocol.

    Attributes:
        endpoint: path used when none is given; it ends with the first of ``suffixes``.
        suffixes: what a path must end with.
        body: words a sample; gets the number of log-probabilities too.
        read: reads an event of a stream; None: the answer is one reply without tokens.
        takes_sampling: temperature and the like are sent.
        takes_ids: prompts may be token ids.
        needs_end: a stream without its closing event is a failure.
        is_chat: the server applies the chat template.
    """

    endpoint: str
    suffixes: tuple[str, ...]
    body: Callable[[Sample, int | None], Body]
    read: Callable[[bytes], Event] | None = None
    takes_sampling: bool = False
    takes_logprobs: bool = False
    takes_ids: bool = False
    takes_ignore_eos: bool = False
    needs_end: bool = False
    is_chat: bool = False

    @property
    def generates(self) -> bool:
        return self.read is not None


_COMPLETIONS = Backend(
    "/v1/completions", ("completions",), _completion, _read_chunk, True, True, True, takes_ignore_eos=True
)
BACKENDS: dict[str, Backend] = {
    "vllm": _COMPLETIONS,
    "openai": _COMPLETIONS,
    "llama.cpp": _COMPLETIONS,
    "openai-chat": Backend(
        "/v1/chat/completions", ("chat/completions",), _chat, _read_chunk, True, True,
        takes_ignore_eos=True, is_chat=True,
    ),
    "openai-responses": Backend(
        "/v1/responses", ("responses",), _responses, _read_response_event, True,
        takes_ignore_eos=True, needs_end=True, is_chat=True,
    ),
    "tgi": Backend("/generate_stream", ("generate_stream",), _tgi, _read_tgi_event),
    "openai-embeddings": Backend("/v1/embeddings", ("embeddings",), _embeddings, takes_ids=True),
    "openai-embeddings-chat": Backend("/v1/embeddings", ("embeddings",), _embeddings_chat, is_chat=True),
    "infinity-embeddings": Backend("/embeddings", ("embeddings",), _plain_input),
    "vllm-pooling": Backend("/pooling", ("pooling",), _plain_input, takes_ids=True),
}  # fmt: skip
"""Name → protocol."""

REFUSED_BACKENDS = {
    "openai-audio": "needs audio input",
    "openai-embeddings-clip": "needs image input",
    "openai-embeddings-vlm2vec": "needs image input",
    "infinity-embeddings-clip": "needs image input",
    "vllm-rerank": "needs the dataset random-rerank",
}
"""Name → what is missing for it here."""
