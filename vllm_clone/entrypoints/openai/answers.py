"""Answers of the OpenAI endpoints: structs whose field order and null fields are the API's.

A field that is absent, not null, when unused has the default UNSET.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

_encode = msgspec.json.Encoder().encode


class Struct(msgspec.Struct, gc=False):
    """Base of all answers."""


class PromptTokensDetails(Struct):
    cached_tokens: int
    created_cache_tokens: int | UnsetType | None = None
    multimodal_tokens: UnsetType | None = None


class Usage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType | None = None
    completion_tokens_details: UnsetType | None = None


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    routed_experts: None = None


class RequestMetrics(Struct):
    """How one request fared (``--enable-per-request-metrics``)."""

    time_to_first_token_ms: float
    generation_time_ms: float
    """First token to last."""
    queue_time_ms: float
    mean_itl_ms: float | UnsetType | None
    """Mean gap between tokens; null for one token."""
    tokens_per_second: float
    speculative_decoding: UnsetType | None = None


class Completion(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None
    system_fingerprint: str | None
    usage: Usage
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: RequestMetrics | None = None


class CompletionChunkChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class ChatTopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]


class ChatMessage(Struct):
    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None = None


class ChatCompletion(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None
    system_fingerprint: str | None
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: RequestMetrics | None = None


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class Chunk(Struct):
    """One streamed chunk of either endpoint."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_text: str | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


def to_json(value: Any) -> bytes:
    """Compact UTF-8 JSON."""
    return _encode(value)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
