"""Routes of /v1/completions and /v1/chat/completions."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from vllm_clone.entrypoints.openai.answers import to_json
from vllm_clone.entrypoints.openai.chat import ChatServing
from vllm_clone.entrypoints.openai.completion import CompletionServing
from vllm_clone.entrypoints.openai.requests import ChatCompletionRequest, CompletionRequest
from vllm_clone.entrypoints.openai.serving import Serving
from vllm_clone.entrypoints.serve.routes import Load, require_json
from vllm_clone.entrypoints.serve.streaming import ClientGone, sse, unless_gone

Runner = ChatServing | CompletionServing


def openai_routes(serving: Serving, load: Load) -> APIRouter:
    """The generation endpoints."""
    router = APIRouter(dependencies=[Depends(require_json)])
    completions, chat = CompletionServing(serving), ChatServing(serving)

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, raw: Request) -> Response:
        return await _respond(completions, body, raw)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, raw: Request) -> Response:
        return await _respond(chat, body, raw)

    async def _respond(runner: Any, body: Any, raw: Request) -> Response:
        headers = serving.read_headers(raw)
        call = await runner.prepare(body, headers)
        if body.stream:
            events = runner.stream(call)
            if serving.frontend.enable_server_load_tracking:
                events = _counted_stream(events, load)
            return sse(events, serving.frontend.sse_keep_alive_interval)
        try:
            answer = await _counted(lambda: unless_gone(raw, runner.answer(call)), load)
        except ClientGone:
            return Response(status_code=499)
        return Response(to_json(answer), media_type="application/json")

    async def _counted(work: Callable[[], Awaitable[Any]], load: Load) -> Any:
        if not serving.frontend.enable_server_load_tracking:
            return await work()
        load.count += 1
        try:
            return await work()
        finally:
            load.count -= 1

    return router


async def _counted_stream(events: AsyncIterator[bytes], load: Load) -> AsyncIterator[bytes]:
    load.count += 1
    try:
        async for piece in events:
            yield piece
    finally:
        load.count -= 1
        await events.aclose()  # type: ignore[attr-defined]
