"""POST /v1/chat/completions."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from msgspec import UNSET

from vllm_clone.engine.inputs import ProcessedRequest
from vllm_clone.entrypoints.openai.answers import (
    DONE,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Chunk,
    RequestMetrics,
    Usage,
    event,
)
from vllm_clone.entrypoints.openai.completion import raise_on_error
from vllm_clone.entrypoints.openai.logprobs import LogprobFormatter, prompt_logprobs_json
from vllm_clone.entrypoints.openai.requests import ChatCompletionRequest
from vllm_clone.entrypoints.openai.serving import RequestHeaders, Serving, UsageCounter, now, request_metrics
from vllm_clone.outputs import CompletionOutput, RequestOutput

CHUNK = "chat.completion.chunk"


@dataclass
class ChatCall:
    """One validated request, ready to run."""

    body: ChatCompletionRequest
    id: str
    created: int
    request: ProcessedRequest
    prompt_text: str
    role: str
    echoed: str
    """Text of the last message when the answer repeats it, else empty."""
    formatter: LogprobFormatter
    usage: UsageCounter
    tokens: dict[int, int] = field(default_factory=dict)
    """Tokens streamed so far per choice."""

    @property
    def num_top(self) -> int:
        return self.body.top_logprobs or 0


class ChatServing:
    """Runs chat requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def prepare(self, body: ChatCompletionRequest, headers: RequestHeaders) -> ChatCall:
        """Validate everything before any answer begins.

        Raises:
            RequestError: the request cannot be served.
        """
        serving = self._serving
        serving.check_model(body.model)
        name, limit = body.limit
        serving.check_max_tokens(name, limit)
        text = await serving.render(body, self._template_extras(body))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.sampling(serving.config.model_config.generation_defaults, limit, logprobs)
        if body.echo and params.prompt_logprobs is None and not body.stream:
            params.prompt_logprobs = body.top_logprobs or 0  # an echo brings its scores along, asked for or not
        prompt = await serving.encode(text, body, body.add_special_tokens)
        request_id = serving.request_id("chatcmpl-", body, headers)
        request = await serving.prepare(prompt, params, request_id, body, headers)
        last = body.messages[-1].model_dump(exclude_unset=True)
        role = serving.frontend.response_role if body.add_generation_prompt else str(last["role"])
        content = last.get("content")
        echoed = content if body.echo and last["role"] == role and isinstance(content, str) else ""
        usage = UsageCounter(serving.frontend.enable_prompt_tokens_details, created=True)
        return ChatCall(body, request_id, now(), request, text, role, echoed, serving.formatter(body), usage)

    @staticmethod
    def _template_extras(body: ChatCompletionRequest) -> dict[str, object]:
        effort = body.reasoning_effort
        return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}

    async def answer(self, call: ChatCall) -> ChatCompletion:
        """The whole answer."""
        final: RequestOutput | None = None
        async with contextlib.aclosing(self._serving.stream(call.request)) as outputs:
            async for final in outputs:
                call.usage.count_prompt(0, final)
        assert final is not None
        raise_on_error({0: final})
        body = call.body
        choices = []
        for one in sorted(final.outputs, key=lambda o: o.index):
            call.usage.completion += len(one.token_ids)
            message = ChatMessage(call.role, call.echoed + one.text)
            ids = list(one.token_ids) if body.return_token_ids else None
            logprobs = self._logprobs(call, one)
            choices.append(ChatChoice(one.index, message, logprobs, one.finish_reason, one.stop_reason, ids))
        return ChatCompletion(
            call.id,
            "chat.completion",
            call.created,
            self._serving.model_names[0],
            choices,
            None,
            self._serving.fingerprint,
            call.usage.whole(),
            prompt_logprobs_json(final.prompt_logprobs),
            final.prompt_token_ids if body.return_token_ids else None,
            call.prompt_text if body.return_prompt_text else None,
            metrics=self._metrics(call, final),
        )

    def _metrics(self, call: ChatCall, output: RequestOutput) -> RequestMetrics | None:
        if not self._serving.frontend.enable_per_request_metrics or (call.body.n or 1) > 1:
            return None
        return request_metrics(output.times, call.usage.completion, in_stream=bool(call.body.stream))

    def _logprobs(self, call: ChatCall, one: CompletionOutput) -> ChatLogprobs | None:
        if not call.body.logprobs or one.logprobs is None:
            return None
        exact = call.body.logprob_token_ids is not None
        return call.formatter.chat(one.token_ids, one.logprobs, call.num_top, exact)

    async def stream(self, call: ChatCall) -> AsyncIterator[bytes]:
        """Server-sent events of the answer: a role chunk per choice first, then text."""
        include_usage, continuous = self._serving.usage_options(call.body)
        opened, output = False, None
        async with contextlib.aclosing(self._serving.stream(call.request)) as outputs:
            async for output in outputs:
                call.usage.count_prompt(0, output)
                raise_on_error({0: output})
                if not opened:
                    opened = True
                    for piece in self._opening(call, continuous):
                        yield piece
                for one in output.outputs:
                    yield event(self._chunk(call, one, include_usage, continuous))
        if include_usage:
            usage, fingerprint = call.usage.final_chunk(), self._serving.fingerprint
            metrics = UNSET if output is None else self._metrics(call, output) or UNSET
            yield event(self._bare(call, [], usage=usage, system_fingerprint=fingerprint, metrics=metrics))
        yield DONE

    def _opening(self, call: ChatCall, continuous: bool) -> list[bytes]:
        body, prompt_len = call.body, call.usage.prompt
        ids = call.request.prompt_token_ids if body.return_token_ids else None
        text = call.prompt_text if body.return_prompt_text else None
        usage = Usage(prompt_len, prompt_len, 0, UNSET, None) if continuous else UNSET
        pieces = []
        for index in range(body.n or 1):
            choice = ChatChunkChoice(index, ChatDelta(call.role, ""), None, None)
            pieces.append(event(self._bare(call, [choice], usage=usage, prompt_token_ids=ids, prompt_text=text)))
        if call.echoed:
            for index in range(body.n or 1):
                choice = ChatChunkChoice(index, ChatDelta(content=call.echoed), None, None)
                pieces.append(event(self._bare(call, [choice], usage=usage)))
        return pieces

    def _chunk(self, call: ChatCall, one: CompletionOutput, include_usage: bool, continuous: bool) -> Chunk:
        total = call.tokens.get(one.index, 0) + len(one.token_ids)
        call.tokens[one.index] = total
        call.usage.completion += len(one.token_ids)
        choice = ChatChunkChoice(
            one.index,
            ChatDelta(content=one.text),
            self._logprobs(call, one) if one.token_ids else None,
            one.finish_reason,
            UNSET if one.finish_reason is None else one.stop_reason,
            list(one.token_ids) if call.body.return_token_ids else None,
        )
        prompt_len = call.usage.prompt
        usage = Usage(prompt_len, prompt_len + total, total, UNSET, None) if continuous else UNSET
        fingerprint = self._serving.fingerprint if one.finish_reason and not include_usage else UNSET
        return self._bare(call, [choice], usage=usage, system_fingerprint=fingerprint)

    def _bare(self, call: ChatCall, choices: list[ChatChunkChoice], **extra: object) -> Chunk:
        return Chunk(call.id, CHUNK, call.created, self._serving.model_names[0], choices, **extra)  # type: ignore[arg-type]
