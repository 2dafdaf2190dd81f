"""POST /v1/completions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from vllm_clone import envs
from vllm_clone.engine.inputs import ProcessedRequest, TokensPrompt
from vllm_clone.entrypoints.openai.answers import (
    DONE,
    Chunk,
    Completion,
    CompletionChoice,
    CompletionChunkChoice,
    CompletionLogprobs,
    RequestMetrics,
    Usage,
    event,
)
from vllm_clone.entrypoints.openai.logprobs import LogprobFormatter, prompt_logprobs_json
from vllm_clone.entrypoints.openai.requests import CompletionRequest
from vllm_clone.entrypoints.openai.serving import RequestHeaders, Serving, UsageCounter, merged, now, request_metrics
from vllm_clone.errors import RequestError
from vllm_clone.outputs import CompletionOutput, PositionLogprobs, RequestOutput


@dataclass
class _Progress:
    """What was streamed of one choice."""

    tokens: int = 0
    chars: int = 0
    """Characters of token texts, for text_offset."""
    started: bool = False


@dataclass
class CompletionCall:
    """One validated request, ready to run."""

    body: CompletionRequest
    id: str
    created: int
    requests: list[ProcessedRequest]
    formatter: LogprobFormatter
    usage: UsageCounter
    progress: dict[int, _Progress] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[PositionLogprobs | None]] = field(default_factory=dict)
    """Scores of a streamed prompt, by its number."""

    @property
    def echo_only(self) -> bool:
        return bool(self.body.echo) and self.body.max_tokens == 0


class CompletionServing:
    """Runs completion requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def prepare(self, body: CompletionRequest, headers: RequestHeaders) -> CompletionCall:
        """Validate everything before any answer begins.

        Raises:
            RequestError: the request cannot be served.
        """
        serving = self._serving
        serving.check_model(body.model)
        echo_only = bool(body.echo) and body.max_tokens == 0
        if not echo_only:
            serving.check_max_tokens("max_tokens", body.max_tokens)
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        defaults = serving.config.model_config.generation_defaults
        params = body.sampling(defaults, max_tokens, body.logprobs, echo_only)
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            params.prompt_logprobs = body.logprobs
        request_id = serving.request_id("cmpl-", body, headers)
        requests = []
        for i, prompt in enumerate(await self._prompts(body)):
            requests.append(await serving.prepare(prompt, params, f"{request_id}-{i}", body, headers))
        usage = UsageCounter(serving.frontend.enable_prompt_tokens_details, created=False)
        return CompletionCall(body, request_id, now(), requests, serving.formatter(body), usage)

    async def _prompts(self, body: CompletionRequest) -> list[TokensPrompt]:
        given: Any = body.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise RequestError("At least one prompt is needed.")
        if body.echo and not body.return_token_ids:
            _ = self._serving.tokenizer  # raises when there is none, before any answer has begun
        limit = envs.VLLM_MAX_COMPLETION_PROMPTS
        if len(given) > limit:
            raise RequestError(
                f"At most {limit} prompts are allowed (VLLM_MAX_COMPLETION_PROMPTS), got {len(given)}.", param="prompt"
            )
        limit = envs.VLLM_MAX_N_SEQUENCES
        if len(given) > 1 and len(given) * body.n > limit:
            raise RequestError(
                f"Prompts times n must be at most {limit} (VLLM_MAX_N_SEQUENCES), got {len(given)} × {body.n}.",
                param="n",
                value=body.n,
            )
        serving = self._serving
        prompts = []
        for p in given:
            if isinstance(p, str):
                prompts.append(await serving.encode(p, body, body.add_special_tokens))
                await asyncio.sleep(0)  # many short prompts are a long text too
            else:
                prompts.append(TokensPrompt(serving.truncated(p, body)))
        return prompts

    async def answer(self, call: CompletionCall) -> Completion:
        """The whole answer."""
        finals: dict[int, RequestOutput] = {}
        generators = [self._serving.stream(r) for r in call.requests]
        async with contextlib.aclosing(merged(generators)) as outputs:  # type: ignore[type-var]
            async for number, output in outputs:
                call.usage.count_prompt(number, output)
                finals[number] = output
        choices = [
            self._choice(call, number, finals[number], one)
            for number in sorted(finals)
            for one in sorted(finals[number].outputs, key=lambda o: o.index)
        ]
        raise_on_error(finals)
        return Completion(
            call.id, "text_completion", call.created, self._serving.model_names[0], choices, None,
            self._serving.fingerprint, call.usage.whole(), metrics=self._metrics(call, finals),
        )  # fmt: skip

    def _metrics(self, call: CompletionCall, outputs: dict[int, RequestOutput]) -> RequestMetrics | None:
        """Timings, when they are wanted and there is one sequence to tell them of."""
        alone = len(call.requests) == 1 and (call.body.n or 1) == 1
        if not self._serving.frontend.enable_per_request_metrics or not alone or 0 not in outputs:
            return None
        return request_metrics(outputs[0].times, call.usage.completion, in_stream=bool(call.body.stream))

    def _choice(
        self, call: CompletionCall, number: int, output: RequestOutput, one: CompletionOutput
    ) -> CompletionChoice:
        body = call.body
        call.usage.completion += len(one.token_ids)
        text, logprobs = self._text_and_logprobs(call, output, one, first=True)
        return CompletionChoice(
            index=number * (body.n or 1) + one.index,
            text=text,
            logprobs=logprobs,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            token_ids=list(one.token_ids) if body.return_token_ids else None,
            prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
        )

    def _text_and_logprobs(
        self, call: CompletionCall, output: RequestOutput, one: CompletionOutput, first: bool, chars: int = 0
    ) -> tuple[str, CompletionLogprobs | None]:
        """Text of a choice or chunk, the prompt in front of it when it is echoed, and its log-probabilities."""
        body = call.body
        ids, text, positions = list(one.token_ids), one.text, list(one.logprobs or [])
        if call.echo_only:
            ids, text, positions = [], "", []
        if body.echo and first:
            if not body.return_token_ids:
                text = self._prompt_text(output) + text
            ids = output.prompt_token_ids + ids
            positions = [*(output.prompt_logprobs or [None] * len(output.prompt_token_ids)), *positions]  # type: ignore[list-item]
        if body.logprobs is None or (not ids and not positions):
            return text, None
        positions = positions[: len(ids)]
        ids = ids[: len(positions)]
        exact = body.logprob_token_ids is not None
        return text, call.formatter.completion(ids, positions, body.logprobs, chars, exact)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._serving.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    async def stream(self, call: CompletionCall) -> AsyncIterator[bytes]:
        """Server-sent events of the answer."""
        include_usage, continuous = self._serving.usage_options(call.body)
        generators = [self._serving.stream(r) for r in call.requests]
        latest: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(merged(generators)) as outputs:  # type: ignore[type-var]
            async for number, output in outputs:
                latest[number] = output
                call.usage.count_prompt(number, output)
                raise_on_error({number: output})
                if output.prompt_logprobs is None:  # said once, with the first of n choices; each one echoes them
                    output.prompt_logprobs = call.prompt_logprobs.get(number)
                else:
                    call.prompt_logprobs[number] = output.prompt_logprobs
                for one in output.outputs:
                    yield event(self._chunk(call, number, output, one, include_usage, continuous))
        if include_usage:
            yield event(
                Chunk(
                    call.id, "text_completion", call.created, self._serving.model_names[0], [],
                    usage=call.usage.final_chunk(), system_fingerprint=self._serving.fingerprint,
                    metrics=self._metrics(call, latest) or UNSET,
                )
            )  # fmt: skip
        yield DONE

    def _chunk(
        self, call: CompletionCall, number: int, output: RequestOutput, one: CompletionOutput, include_usage: bool,
        continuous: bool,
    ) -> Chunk:  # fmt: skip
        body = call.body
        index = number * body.n + one.index
        progress = call.progress.setdefault(index, _Progress())
        first, progress.started = not progress.started, True
        text, logprobs = self._text_and_logprobs(call, output, one, first, progress.chars)
        progress.chars += sum(map(len, logprobs.tokens)) if logprobs else 0
        progress.tokens += len(one.token_ids)
        call.usage.completion += len(one.token_ids)
        prompt_len = len(output.prompt_token_ids)
        wants_ids = first and (body.return_token_ids or body.echo)
        choice = CompletionChunkChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            prompt_token_ids=output.prompt_token_ids if wants_ids else None,
            token_ids=list(one.token_ids) if body.return_token_ids else None,
        )
        usage = Usage(prompt_len, prompt_len + progress.tokens, progress.tokens, UNSET, UNSET) if continuous else UNSET
        fingerprint = self._serving.fingerprint if one.finish_reason and not include_usage else UNSET
        return Chunk(
            call.id, "text_completion", call.created, self._serving.model_names[0], [choice], usage, fingerprint
        )


def raise_on_error(outputs: dict[int, RequestOutput]) -> None:
    """An engine-side failure of one sequence is the whole request's failure."""
    for output in outputs.values():
        for one in output.outputs:
            if one.finish_reason == "error":
                raise RequestError("The engine could not finish this request; try again.", kind="internal")
