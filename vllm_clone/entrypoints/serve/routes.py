"""Routes that are not generation: health, version, metrics, models, tokens."""

import functools
import json
import re
import secrets
from typing import Any

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from vllm_clone import envs
from vllm_clone.engine.shared_engine import Board
from vllm_clone.entrypoints.openai.answers import to_json
from vllm_clone.entrypoints.openai.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from vllm_clone.entrypoints.openai.serving import INLINE_CHARS, Serving, now
from vllm_clone.entrypoints.serve.errors import ContentTypeError
from vllm_clone.errors import EngineDeadError, RequestError
from vllm_clone.version import VLLM_INTERFACE_VERSION

_SURROGATE = re.compile(rb"\\\0*u\0*[dD]\0*[89a-fA-F]")
"""An escaped half of a surrogate pair, in any encoding that JSON allows."""


async def require_json(request: Request) -> None:
    """Bodies must be declared as application/json, and their texts must be valid Unicode."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ContentTypeError
    body = await request.body()
    if _SURROGATE.search(body):
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RequestError("The text is not valid Unicode: it holds half of a surrogate pair.") from error
        except (ValueError, RecursionError):
            return  # no JSON, which whoever parses the body will say


class Load:
    """Generation requests in flight, for /load; ``board`` knows those of other API servers."""

    def __init__(self, board: Board | None = None) -> None:
        self._board = board
        self._own = 0

    def add(self, change: int) -> None:
        self._own += change
        if self._board is not None:
            self._board.post("load", self._own)

    @property
    def count(self) -> int:
        return self._own + (self._board.others("load") if self._board is not None else 0)


def service_routes(serving: Serving, load: Load, registry: CollectorRegistry) -> APIRouter:
    """Health, version and what operators read."""
    router = APIRouter()

    async def health() -> Response:
        try:
            await serving.engine.check_health()
        except EngineDeadError:
            return Response(status_code=503)
        return Response(status_code=200)

    router.add_api_route("/health", health, methods=["GET"])
    for method in ("GET", "POST"):  # one route each: a route with two methods has one operation id for both
        router.add_api_route("/ping", health, methods=[method])

    @router.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": VLLM_INTERFACE_VERSION})

    @router.get("/load")
    async def server_load() -> JSONResponse:
        return JSONResponse({"server_load": load.count})

    @router.get("/kv_event_sources")
    async def kv_event_sources() -> JSONResponse:
        return JSONResponse({})

    @router.api_route("/metrics/{rest:path}", methods=["GET", "HEAD"], include_in_schema=False)
    @router.api_route("/metrics", methods=["GET", "HEAD"], include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=None, headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_card(serving, name) for name in serving.model_names]})

    return router


def operator_routes(serving: Serving) -> APIRouter:
    """What an operator switches on: traces of steps, and calls into the worker."""
    router = APIRouter()

    if serving.config.profiler_config:

        @router.post("/start_profile")
        async def start_profile() -> Response:
            await serving.engine.utility("profile", True)
            return Response()

        @router.post("/stop_profile")
        async def stop_profile() -> Response:
            await serving.engine.utility("profile", False)
            return Response()

    if envs.VLLM_SERVER_DEV_MODE:

        @router.post("/collective_rpc", dependencies=[Depends(require_json)])
        async def collective_rpc(body: WorkerCall) -> Response:
            try:
                results = await serving.engine.utility("collective_rpc", body.method, body.args, body.kwargs)
            except RuntimeError as error:
                raise RequestError(str(error), param="method", value=body.method) from error
            return Response(to_json({"results": results}), media_type="application/json")

    return router


class WorkerCall(BaseModel):
    """The body of /collective_rpc."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


def _card(serving: Serving, name: str) -> dict[str, Any]:
    created = now()
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": serving.config.model_config.model,
        "parent": None,
        "max_model_len": serving.max_model_len,
        "permission": [
            {
                "id": "modelperm-" + secrets.token_hex(8),
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def token_routes(serving: Serving) -> APIRouter:
    """/tokenize and /detokenize, and /tokenizer_info when it is switched on."""
    router = APIRouter()

    @router.post("/tokenize", dependencies=[Depends(require_json)])
    async def tokenize(body: TokenizeRequest) -> Response:
        serving.check_model(body.model)
        text = await serving.render(body) if isinstance(body, TokenizeChatRequest) else body.prompt
        tokenizer = serving.tokenizer
        if len(text) > INLINE_CHARS:
            ids = await serving.in_thread(tokenizer.encode, text, body.add_special_tokens)
        else:
            ids = tokenizer.encode(text, body.add_special_tokens)
        strings = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": serving.max_model_len, "tokens": ids, "token_strs": strings}
        return Response(to_json(answer), media_type="application/json")

    @router.post("/detokenize", dependencies=[Depends(require_json)])
    async def detokenize(body: DetokenizeRequest) -> Response:
        serving.check_model(body.model)
        decode = functools.partial(serving.tokenizer.decode, body.tokens, skip_special_tokens=False)
        text = await serving.in_thread(decode) if len(body.tokens) > INLINE_CHARS else decode()
        return Response(to_json({"prompt": text}), media_type="application/json")

    if serving.frontend.enable_tokenizer_info_endpoint:

        @router.get("/tokenizer_info")
        async def tokenizer_info() -> JSONResponse:
            return JSONResponse(serving.tokenizer.init_settings())

    return router
