"""Routes of /v1/completions and /v1/chat/completions."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from vllm_clone.entrypoints.openai.answers import to_json
from vllm_clone.entrypoints.openai.chat import ChatServing
from vllm_clone.entrypoints.openai.completion import CompletionServing
from vllm_clone.entrypoints.openai.requests import ChatCompletionRequest, CompletionRequest
from vllm_clone.entrypoints.openai.serving import Serving
from vllm_clone.entrypoints.serve.routes import Load, require_json
from vllm_clone.entrypoints.serve.streaming import ClientGone, sse, unless_gone

LOAD_HEADER = "endpoint-load-metrics"
LOAD_GAUGES = ("num_requests_waiting", "kv_cache_usage_perc")


def openai_routes(serving: Serving, load: Load, registry: CollectorRegistry) -> APIRouter:
    """The generation endpoints. ``registry`` holds the gauges that answers report when asked to."""
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
        reported = load_report(raw.headers.get("endpoint-load-metrics-format"), registry, serving.model_names[0])
        return Response(to_json(answer), media_type="application/json", headers=reported)

    async def _counted(work: Callable[[], Awaitable[Any]], load: Load) -> Any:
        if not serving.frontend.enable_server_load_tracking:
            return await work()
        load.add(1)
        try:
            return await work()
        finally:
            load.add(-1)

    return router


def load_report(form: str | None, registry: CollectorRegistry, model_name: str) -> dict[str, str] | None:
    """The answer header ``endpoint-load-metrics`` that load balancers read, in the form TEXT or JSON (ORCA)."""
    if form is None or form.upper() not in ("TEXT", "JSON"):
        return None
    labels = {"model_name": model_name, "engine": "0"}
    values = {name: registry.get_sample_value(f"vllm:{name}", labels) for name in LOAD_GAUGES}
    if None in values.values():
        return None  # --disable-log-stats
    if form.upper() == "JSON":
        return {LOAD_HEADER: "JSON " + json.dumps({"named_metrics": values})}
    return {LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{k}={v}" for k, v in values.items())}


async def _counted_stream(events: AsyncIterator[bytes], load: Load) -> AsyncIterator[bytes]:
    load.add(1)
    try:
        async for piece in events:
            yield piece
    finally:
        load.add(-1)
        await events.aclose()  # type: ignore[attr-defined]
