"""Request bodies of the OpenAI endpoints: field types and defaults. Ranges are SamplingParams' business.

A field that is documented but whose feature does not exist yet is refused with its name, never ignored; fields
nobody documents are tolerated and logged once.
"""

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from vllm_clone import envs
from vllm_clone.errors import RequestError
from vllm_clone.logger import init_logger, log_once
from vllm_clone.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

logger = init_logger(__name__)

INT64 = 2**63 - 1
SALT_LIMIT, SALT_BANNED = 128, "@/\\\0"
Int64 = Annotated[int, Field(ge=-INT64 - 1, le=INT64)]
TokenId = Annotated[int, Field(ge=0)]

# A list of a million wrong items would be a million errors, and writing them stops the server for minutes.
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong item is the only error."""


def _at_most(limit: int) -> BeforeValidator:
    """The same for maps, where the first error is never the last: those with more entries are not looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, Mapping) and len(value) > limit:
            raise ValueError(f"at most {limit} entries are allowed, got {len(value)}")
        return value

    return BeforeValidator(check)


Biases = Annotated[dict[str, float], _at_most(300_000)]
"""No vocabulary is larger."""
Arguments = Annotated[dict[str, str | Int64 | float | Items[str | Int64 | float]], _at_most(1000)]
Document = Annotated[dict[str, str], _at_most(1000)]
MAX_UNKNOWN, MAX_NAME = 100, 100
"""How many names of unknown fields are logged, and how many characters of each."""

DEFAULTABLE = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Fields for which the model's generation config may hold a default."""

NOT_YET: dict[str, str] = {
    "use_beam_search": "beam search is not implemented yet",
    "watermarking": "watermarking is not implemented yet",
}
"""Documented fields that are refused when they ask for something; null, false and empty values ask for nothing.

Not among them: kv_transfer_params and ec_transfer_params, which mean nothing to a server without a connector, and
vllm_xargs, which only extensions read.
"""


NO_EFFECT: dict[str, str] = {
    "kv_transfer_params": "no KV connector is configured",
    "ec_transfer_params": "no encoder cache connector is configured",
    "vllm_xargs": "only --logits-processors read it",
}
"""Documented fields that vLLM accepts without effect in a server set up like this one: taken, and said so once."""


class ApiModel(BaseModel):
    """Base of all bodies: unknown fields are tolerated and logged once."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True, protected_namespaces=())

    def model_post_init(self, context: Any, /) -> None:
        for name in self.model_extra or ():
            shown = name[:MAX_NAME]
            if shown not in _unknown and len(_unknown) < MAX_UNKNOWN:
                _unknown.add(shown)
                logger.warning("The request field %r is not known and is ignored.", shown)


_unknown: set[str] = set()


class StreamOptions(ApiModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class RepetitionDetection(ApiModel):
    max_pattern_size: Int64 = 0
    min_pattern_size: Int64 = 0
    min_count: Int64 = 0


class JsonSchemaFormat(ApiModel):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """The schema is held to in any case."""


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Any = None
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None

    def constraint(self) -> tuple[str, Any] | None:
        """Name and value of the structured output that it stands for; None for free text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return "json_object", True
        if self.type == "json_schema":
            if self.json_schema is None:
                raise RequestError("response_format of type json_schema needs json_schema.", param="response_format")
            if self.json_schema.json_schema is None:
                raise RequestError("response_format.json_schema needs a schema.")
            return "json", self.json_schema.json_schema
        if self.structures is not None:
            tag: dict[str, Any] = {"structures": self.structures, "triggers": self.triggers}
        elif self.format is not None:
            tag = {"format": self.format}
        else:
            message = "response_format of type structural_tag needs format, or structures and triggers."
            raise RequestError(message, param="response_format")
        return "structural_tag", json.dumps({"type": "structural_tag", **tag})


class StructuredOutputs(ApiModel):
    """What the output must follow: one of the first six."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def options(self) -> dict[str, Any]:
        """How JSON is written."""
        names = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
        return {name: getattr(self, name) for name in names}

    def kinds(self) -> dict[str, Any]:
        """The constraints that are given, by name."""
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        found = {name: getattr(self, "json_" if name == "json" else name) for name in names}
        return {name: value for name, value in found.items() if value is not None}


class GenerationRequest(ApiModel):
    """Fields that completions and chat share."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | Items[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Items[int] | None = None
    repetition_detection: RepetitionDetection | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    priority: Int64 = 0
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: Any = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None

    use_beam_search: bool = False
    length_penalty: float = 1.0
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    watermarking: bool | None = None
    vllm_xargs: Arguments | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        limit = envs.VLLM_MAX_STOP_STRINGS
        if isinstance(value, list) and len(value) > limit:
            raise ValueError(f"at most {limit} stop strings are allowed (VLLM_MAX_STOP_STRINGS), got {len(value)}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _early(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            _check_number(data, "prompt_logprobs")
        return data

    @model_validator(mode="after")
    def _refuse(self) -> "GenerationRequest":
        for name, why in NO_EFFECT.items():
            if getattr(self, name, None):
                log_once(logger, logging.WARNING, f"The request field {name!r} has no effect here: {why}.")
        for name, reason in NOT_YET.items():
            if getattr(self, name, None):
                raise RequestError(f"{reason}; leave {name!r} out.", kind="not_implemented", param=name)
        if self.thinking_token_budget not in (None, -1):
            raise RequestError("thinking_token_budget needs a reasoning parser, and this server has none.")
        self.constraint()
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise RequestError("stream_options needs stream: true.", param="stream_options")
        if self.prompt_logprobs is not None:
            if self.prompt_logprobs < -1:
                raise RequestError("prompt_logprobs must be -1 or at least 0.", param="prompt_logprobs")
            if self.stream and self.prompt_logprobs != 0:
                raise RequestError("prompt_logprobs cannot be streamed; set stream false.", param="prompt_logprobs")
        _check_salt(self.cache_salt)
        return self

    def constraint(self) -> StructuredOutputsParams | None:
        """What the output must follow, by ``structured_outputs`` and ``response_format`` together.

        Raises:
            RequestError: they ask for none or for several things.
        """
        given = self.structured_outputs
        kinds = {} if given is None else given.kinds()
        form = None if self.response_format is None else self.response_format.constraint()
        if form is not None:
            other = next((name for name in kinds if name != form[0]), None)
            if other is not None:
                raise RequestError(
                    f"response_format asks for {form[0]} and structured_outputs for {other}; give one of them.",
                    param="structured_outputs",
                )
            kinds = dict([form])
        if given is None and form is None:
            return None
        if len(kinds) != 1:
            got = ", ".join(kinds) or "none"
            raise RequestError(
                "structured_outputs needs exactly one of json, regex, choice, grammar, json_object and "
                f"structural_tag; got {got}.",
                param="structured_outputs",
            )
        return StructuredOutputsParams(**kinds, **({} if given is None else given.options()))

    def sampling(
        self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None, echo_only: bool = False
    ) -> SamplingParams:
        """Sampling parameters: request, then server defaults, then the library's.

        Raises:
            RequestError: a logit_bias key that is no integer.
        """
        given = {n: defaults.get(n) if getattr(self, n) is None else getattr(self, n) for n in DEFAULTABLE}
        cap = defaults.get("max_tokens")
        if cap is not None:
            max_tokens = cap if max_tokens is None else min(max_tokens, cap)
        detection = self.repetition_detection
        return SamplingParams(
            **{k: v for k, v in given.items() if v is not None},
            n=1 if (n := getattr(self, "n", 1)) is None else n,
            seed=self.seed,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=self.ignore_eos,
            max_tokens=1 if echo_only else max_tokens,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logprob_token_ids=self.logprob_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            logit_bias=_logit_bias(self.logit_bias),
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words or [],
            repetition_detection=None
            if detection is None
            else RepetitionDetectionParams(detection.max_pattern_size, detection.min_pattern_size, detection.min_count),
            stream_interval=self.stream_interval,
            extra_args=self.vllm_xargs,
            structured_outputs=self.constraint(),
        )


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Items[TokenId] | Items[Items[TokenId]] | str | Items[str] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    max_tokens: int | None = 16
    n: int = 1
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _before(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        _check_number(data, "logprobs")
        if data.get("prompt_embeds") is not None:
            message = "prompt_embeds need --enable-prompt-embeds, which is not implemented yet; send prompt."
            raise RequestError(message, param="prompt_embeds")
        if data.get("prompt") is None or data.get("prompt") == "":
            raise RequestError("A prompt is needed: a string, token ids, or a list of either.", param="prompt")
        if data.get("suffix"):
            raise RequestError("suffix needs a fill-in-the-middle model; this one has no such format.", param="suffix")
        if data.get("logprob_token_ids") is not None and data.get("logprobs") is None:
            raise RequestError("logprob_token_ids needs logprobs.", param="logprob_token_ids")
        return data

    @model_validator(mode="after")
    def _after(self) -> "CompletionRequest":
        if self.logprobs is not None and self.logprobs < -1:
            raise RequestError("logprobs must be -1 (whole vocabulary) or at least 0.", param="logprobs")
        return self


MessageContent = str | Items[str | dict[str, Any]]


class ChatCompletionDeveloperMessageParam(ApiModel):
    content: MessageContent
    role: Literal["developer"]
    name: str | None = None


class ChatCompletionSystemMessageParam(ApiModel):
    content: MessageContent
    role: Literal["system"]
    name: str | None = None


class ChatCompletionUserMessageParam(ApiModel):
    content: MessageContent
    role: Literal["user"]
    name: str | None = None


class ChatCompletionAssistantMessageParam(ApiModel):
    role: Literal["assistant"]
    content: MessageContent | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatCompletionToolMessageParam(ApiModel):
    content: MessageContent
    role: Literal["tool"]
    tool_call_id: str


class CustomChatCompletionMessageParam(ApiModel):
    """Any other role; the template decides what to do with it. Content may be absent, but not null."""

    role: str
    content: MessageContent = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None


ChatMessage = (
    ChatCompletionDeveloperMessageParam
    | ChatCompletionSystemMessageParam
    | ChatCompletionUserMessageParam
    | ChatCompletionAssistantMessageParam
    | ChatCompletionToolMessageParam
    | CustomChatCompletionMessageParam
)


class FunctionDefinition(ApiModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatFields(ApiModel):
    """What decides the prompt of a conversation."""

    messages: Items[Annotated[ChatMessage, Field(union_mode="left_to_right")]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[Document] | None = None
    tools: Items[Tool] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_ending(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if data.get("continue_final_message") and data.get("add_generation_prompt"):
            raise RequestError("continue_final_message and add_generation_prompt cannot both be true.")
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if data.get(name):
                message = f"{name} needs --trust-request-mm-kwargs and a multimodal model; leave it out."
                raise RequestError(message, param=name)
        return data

    def plain_messages(self) -> list[dict[str, Any]]:
        return [m.model_dump(exclude_unset=True) for m in self.messages]

    def plain_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tools is None else [t.model_dump(exclude_none=True) for t in self.tools]


class ChatCompletionRequest(GenerationRequest, ChatFields):
    """Body of /v1/chat/completions."""

    max_completion_tokens: int | None = None
    n: int | None = 1
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    echo: bool = False
    return_prompt_text: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _tools_fit(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        tools, choice = data.get("tools"), data.get("tool_choice")
        if isinstance(tools, list) and not tools:
            raise RequestError("tools must not be an empty list; leave it out.", param="tools")
        if choice not in (None, "none"):
            _check_tool_choice(tools, choice)
        return data

    @model_validator(mode="after")
    def _chat_after(self) -> "ChatCompletionRequest":
        if self.tools and self.tool_choice != "none":
            message = (
                "tool_choice auto needs --enable-auto-tool-choice and --tool-call-parser, which are not implemented "
            )
            raise RequestError(message + 'yet; send tool_choice "none".')
        top = self.top_logprobs or 0
        if top < -1:
            raise RequestError("top_logprobs must be -1 or at least 0.", param="top_logprobs")
        if top and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        if self.logprob_token_ids is not None and not self.logprobs:
            raise RequestError("logprob_token_ids needs logprobs: true.", param="logprob_token_ids")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that bounds the output."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class TokenizeCompletionRequest(ApiModel):
    """Body of /tokenize with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatFields):
    """Body of /tokenize with a conversation."""

    model: str | None = None
    return_token_strs: bool | None = False


TokenizeRequest = Annotated[TokenizeCompletionRequest | TokenizeChatRequest, Field(union_mode="left_to_right")]


class DetokenizeRequest(ApiModel):
    """Body of /detokenize."""

    tokens: Items[Annotated[int, Field(ge=0, le=INT64)]]
    model: str | None = None


def _check_tool_choice(tools: Any, choice: Any) -> None:
    if not tools:
        raise RequestError("tool_choice needs tools.", param="tool_choice")
    if not isinstance(tools, list):
        return  # which the schema says
    if isinstance(choice, str):
        if choice not in ("auto", "required"):
            raise RequestError(
                f"tool_choice {choice!r} is not none, auto, required or a function.", param="tool_choice"
            )
        return
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError("tool_choice needs a function object.", param="tool_choice.function")
    if not function.get("name"):
        raise RequestError("tool_choice.function needs a name.", param="tool_choice.function.name")
    functions = [t.get("function") for t in tools if isinstance(t, Mapping)]
    if function["name"] not in [f.get("name") for f in functions if isinstance(f, Mapping)]:
        raise RequestError(f"tool_choice names {function['name']!r}, which is not among tools.", param="tool_choice")


def _check_number(data: Mapping[str, Any], name: str) -> None:
    if isinstance(data.get(name), str):
        raise RequestError(f"{name} must be a number.", param=name)


def _check_salt(salt: Any) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not salt or len(salt) > SALT_LIMIT or any(c in salt for c in SALT_BANNED):
        rule = f"cache_salt must be a string of 1 to {SALT_LIMIT} characters without @, /, \\ and NUL."
        raise RequestError(rule, param="cache_salt")


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    out: dict[int, float] = {}
    wrong = []
    for key, value in bias.items():
        try:
            out[int(key)] = min(max(value, -100.0), 100.0)
        except ValueError:
            wrong.append(key)
    if wrong:
        raise RequestError(f"logit_bias keys must be token ids; {wrong[:5]} are not.", param="logit_bias")
    return out
