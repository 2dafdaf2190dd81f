"""What the OpenAI endpoints share: names, ids, prompts, usage, and the merging of several generators."""

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import UNSET
from starlette.requests import Request

from vllm_clone.chat import ChatRenderer, load_template
from vllm_clone.config import FrontendConfig, VllmConfig
from vllm_clone.engine.async_llm import AsyncLLM
from vllm_clone.engine.inputs import ProcessedRequest, TokensPrompt
from vllm_clone.entrypoints.openai.answers import PromptTokensDetails, RequestMetrics, Usage
from vllm_clone.entrypoints.openai.logprobs import LogprobFormatter
from vllm_clone.entrypoints.openai.requests import INT64, ChatFields, GenerationRequest
from vllm_clone.errors import RequestError
from vllm_clone.logger import init_logger
from vllm_clone.outputs import RequestOutput, RequestTimes
from vllm_clone.sampling_params import SamplingParams
from vllm_clone.tokenizers import Tokenizer
from vllm_clone.version import VLLM_INTERFACE_VERSION

logger = init_logger(__name__)
T = TypeVar("T")

INLINE_CHARS = 2048
"""Longest text tokenized in the event loop; a thread costs more than this much text."""
INLINE_MESSAGES = 50
"""Longest conversation rendered in the event loop, for the same reason."""
MAX_DP_RANKS = 1


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """What headers say about one request."""

    request_id: str | None
    priority: int | None


class Serving:
    """One model behind the API."""

    def __init__(self, engine: AsyncLLM, config: VllmConfig, frontend: FrontendConfig) -> None:
        self.engine = engine
        self.config = config
        self.frontend = frontend
        names = config.model_config.served_model_name
        assert names
        self.model_names: list[str] = names
        self._pool = ThreadPoolExecutor(config.model_config.renderer_num_workers, "renderer")
        self.fingerprint = _fingerprint(config, frontend)
        template = load_template(frontend.chat_template)
        tokenizer = engine.tokenizer
        self.renderer = (
            None
            if tokenizer is None
            else ChatRenderer(tokenizer, template, frontend.chat_template_content_format, self.model_names[0])
        )

    @property
    def max_model_len(self) -> int:
        length = self.config.model_config.max_model_len
        assert length is not None
        return length

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError when the server has none."""
        if self.engine.tokenizer is None:
            raise RequestError("This server has no tokenizer (--skip-tokenizer-init); send and expect token ids.")
        return self.engine.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raise RequestError unless ``name`` is absent or one we serve."""
        if name and name not in self.model_names:
            valid = ", ".join(self.model_names)
            raise RequestError(
                f"The model {name!r} does not exist; this server has {valid}.",
                kind="not_found",
                param="model",
                value=name,
            )

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """The result of work that would hold up the event loop, done by one of --renderer-num-workers threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def read_headers(self, raw: Request) -> RequestHeaders:
        """Headers that change how a request is served. Values that are no integers are ignored, as vLLM does."""
        rank = _integer(raw.headers.get("x-data-parallel-rank"))
        if rank is not None and not 0 <= rank < MAX_DP_RANKS:
            raise RequestError(f"X-data-parallel-rank {rank} is outside [0, {MAX_DP_RANKS}).", value=rank)
        priority = _integer(raw.headers.get("x-vllm-priority"))
        if priority is not None and not -INT64 - 1 <= priority <= INT64:
            raise RequestError("X-Vllm-Priority must fit in 64 bits.", param="priority")
        return RequestHeaders(raw.headers.get("x-request-id"), priority)

    def request_id(self, prefix: str, body: GenerationRequest, headers: RequestHeaders) -> str:
        given = headers.request_id if headers.request_id is not None else body.request_id
        return prefix + (secrets.token_hex(8) if given is None else given)

    def check_max_tokens(self, name: str, value: int | None) -> None:
        """Raise RequestError, naming the field, when a limit is below 1 or above the context."""
        if value is None:
            return
        if value < 1:
            raise RequestError(f"{name} must be at least 1, got {value}.", param=name, value=value)
        if value > self.max_model_len:
            raise RequestError(
                f"{name} must be at most the context length ({self.max_model_len}), got {value}.",
                param=name,
                value=value,
            )

    async def encode(self, text: str, body: GenerationRequest, add_special_tokens: bool) -> TokensPrompt:
        """Tokenize, in a thread when that takes long, and truncate when the request says so."""
        keep = body.truncate_prompt_tokens
        if keep is None:
            encode = self.engine.input_processor.encode
        else:
            if keep > self.max_model_len:
                raise RequestError(
                    f"truncate_prompt_tokens must be at most the context length ({self.max_model_len}), got {keep}.",
                    param="truncate_prompt_tokens",
                    value=keep,
                )
            encode = self.tokenizer.encode
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The prompt is not valid Unicode: {error.reason} at {error.start}.") from error
        if len(text) > INLINE_CHARS:
            ids = await self.in_thread(encode, text, add_special_tokens)
        else:
            ids = encode(text, add_special_tokens)
        return TokensPrompt(self.truncated(ids, body), text)

    def truncated(self, ids: list[int], body: GenerationRequest) -> list[int]:
        """The first or last ``truncate_prompt_tokens`` ids; −1 leaves room for one output token."""
        keep = body.truncate_prompt_tokens
        if keep is None:
            return ids
        count = self.max_model_len - 1 if keep == -1 else keep
        return ids[:count] if body.truncation_side == "right" else ids[max(len(ids) - count, 0) :]

    async def render(self, body: ChatFields, extra: dict[str, object] | None = None) -> str:
        """The prompt text of a conversation."""
        if self.renderer is None:
            raise RequestError("Chat needs a tokenizer; this server has none (--skip-tokenizer-init).")
        defaults = self.frontend.default_chat_template_kwargs or {}
        kwargs = {**defaults, **(extra or {}), **(body.chat_template_kwargs or {})}
        trusted = self.frontend.trust_request_chat_template
        template = body.chat_template or kwargs.pop("chat_template", None)
        if template is not None and not trusted:
            raise RequestError(
                "A request may not bring a chat template; the server needs --trust-request-chat-template."
            )
        messages = body.plain_messages()
        size = sum(_length(m.get("content")) for m in messages)
        arguments: dict[str, Any] = {
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
            "tools": None if self._drops_tools(body) else body.plain_tools(),
            "documents": body.documents,
            "chat_template": template,
            "chat_template_kwargs": kwargs,
        }
        if size > INLINE_CHARS or len(messages) > INLINE_MESSAGES or template is not None:
            return await self.in_thread(functools.partial(self.renderer.render, messages, **arguments))
        return self.renderer.render(messages, **arguments)

    async def prepare(
        self,
        prompt: TokensPrompt,
        params: SamplingParams,
        request_id: str,
        body: GenerationRequest,
        headers: RequestHeaders,
    ) -> ProcessedRequest:
        """Validate one prompt's request; nothing is started."""
        priority = headers.priority if headers.priority is not None else body.priority
        request = await self.engine.prepare(prompt, params, request_id, priority=priority, cache_salt=body.cache_salt)
        if self.config.observability_config.enable_log_requests:
            cut = self.frontend.max_log_len
            shown = (prompt.prompt or "")[:cut] if cut is not None else prompt.prompt
            logger.info("Received request %s: params: %s, prompt: %r", request_id, params, shown)
        return request

    def _drops_tools(self, body: ChatFields) -> bool:
        unwanted = getattr(body, "tool_choice", None) == "none"
        return unwanted and self.frontend.exclude_tools_when_tool_choice_none

    async def stream(self, request: ProcessedRequest) -> AsyncGenerator[RequestOutput, None]:
        """The engine's outputs for one prompt, logged when --enable-log-outputs says so."""
        outputs = self.engine.stream(request)
        if not self.frontend.enable_log_outputs:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
            return
        log = OutputLog(self.frontend.enable_log_deltas, self.frontend.max_log_len)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                log.add(output)
                yield output

    def formatter(self, body: GenerationRequest) -> LogprobFormatter:
        as_ids = body.return_tokens_as_token_ids
        return LogprobFormatter(
            self.engine.tokenizer, self.frontend.return_tokens_as_token_ids if as_ids is None else as_ids
        )

    def usage_options(self, body: GenerationRequest) -> tuple[bool, bool]:
        """(usage at the end of a stream, usage on every chunk)."""
        if self.frontend.enable_force_include_usage:
            return True, True
        options = body.stream_options
        include = bool(options and options.include_usage)
        return include, include and bool(options and options.continuous_usage_stats)


class OutputLog:
    """Logs what one request generates: each streamed piece when asked to, and the whole at the end."""

    def __init__(self, deltas: bool, max_len: int | None) -> None:
        self._deltas = deltas
        self._max_len = max_len
        self._texts: dict[int, str] = {}
        self._ids: dict[int, list[int]] = {}

    def add(self, output: RequestOutput) -> None:
        """Take in one output; its pieces are what is new."""
        for one in output.outputs:
            begun = one.index in self._texts
            self._texts[one.index] = text = self._texts.get(one.index, "") + one.text
            ids = self._ids.setdefault(one.index, [])
            ids += one.token_ids
            if one.finish_reason is not None:
                name = f"{output.request_id} (choice {one.index})" if one.index else output.request_id
                logger.info(
                    "Generated response %s: output: %r, finish_reason: %s", name, self._cut(text), one.finish_reason
                )
                logger.debug("Generated response %s: token ids: %s", name, self._cut(ids))
            if self._deltas and (begun or one.finish_reason is None):
                logger.info("Generated response %s: streaming delta: %r", output.request_id, self._cut(one.text))

    def _cut(self, value: Any) -> Any:
        return value if self._max_len is None else value[: self._max_len]


class UsageCounter:
    """Token counts of one API request over its prompts and choices."""

    def __init__(self, details: bool, created: bool) -> None:
        self._details = details
        self._created = created
        self.prompt = 0
        self.completion = 0
        self._cached = 0
        self._created_tokens = 0
        self._seen: set[int] = set()

    def count_prompt(self, index: int, output: RequestOutput) -> None:
        """Count a prompt the first time one of its outputs comes."""
        if index not in self._seen:
            self._seen.add(index)
            self.prompt += len(output.prompt_token_ids)
            self._cached += output.num_cached_tokens or 0
            self._created_tokens += output.num_created_cache_tokens or 0

    def whole(self) -> Usage:
        """Usage of a plain answer."""
        created = self._created_tokens if self._created else None
        details = PromptTokensDetails(self._cached, created) if self._details else None
        return Usage(self.prompt, self.prompt + self.completion, self.completion, details)

    def final_chunk(self) -> Usage:
        """Usage at the end of a stream, without null fields."""
        details = PromptTokensDetails(self._cached, self._created_tokens if self._created else UNSET, UNSET)
        shown = details if self._details else UNSET
        return Usage(self.prompt, self.prompt + self.completion, self.completion, shown, UNSET)


async def merged(generators: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several generators as they come, with the generator's number. Closing it closes them all."""
    if len(generators) == 1:
        async with contextlib.aclosing(generators[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=64)

    async def pump(number: int, generator: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(generator):
                async for output in generator:
                    await queue.put((number, output))
            await queue.put((number, None))
        except Exception as error:  # whatever it is, the consumer must not wait for ever
            await queue.put((number, error))

    tasks = [asyncio.create_task(pump(i, g)) for i, g in enumerate(generators)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fingerprint(config: VllmConfig, frontend: FrontendConfig) -> str | None:
    """What answers call system_fingerprint. This build runs one device, so there is no parallel part."""
    if frontend.fingerprint_mode == "none":
        return None
    if frontend.fingerprint_mode == "custom":
        return frontend.fingerprint_value
    return f"vllm-{VLLM_INTERFACE_VERSION}-{config.compute_hash()[:8]}"


def request_metrics(times: RequestTimes, num_tokens: int, *, in_stream: bool = False) -> RequestMetrics:
    """Timings of a finished request of one sequence; streams leave out what is null."""
    generation = times.last_token - times.first_token
    total = times.first_token_latency + generation
    null = UNSET if in_stream else None
    return RequestMetrics(
        times.first_token_latency * 1000,
        generation * 1000,
        max(times.scheduled - times.queued, 0.0) * 1000 if times.queued else 0.0,
        generation * 1000 / (num_tokens - 1) if num_tokens > 1 else null,
        num_tokens / total if total > 0 else 0.0,
        null,
    )


def now() -> int:
    return int(time.time())


def _length(content: Any) -> int:
    """About how much work a message is to render, in characters."""
    if isinstance(content, str):
        return len(content)
    texts = [p.get("text") for p in content or () if isinstance(p, dict)]
    return sum(len(t) for t in texts if isinstance(t, str))


def _integer(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
