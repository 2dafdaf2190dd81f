"""The ASGI application: routes, layers, errors."""

import inspect
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from vllm_clone import envs
from vllm_clone.config import FrontendConfig, VllmConfig
from vllm_clone.config.named_code import import_named
from vllm_clone.engine.async_llm import AsyncLLM
from vllm_clone.engine.shared_engine import Board
from vllm_clone.entrypoints.openai.routes import openai_routes
from vllm_clone.entrypoints.openai.serving import Serving
from vllm_clone.entrypoints.serve import errors, offline_docs
from vllm_clone.entrypoints.serve.middleware import (
    Authentication,
    BodyLimit,
    LastResort,
    RequestIdHeader,
    RequestMetrics,
)
from vllm_clone.entrypoints.serve.routes import Load, operator_routes, service_routes, token_routes
from vllm_clone.errors import ConfigError, EngineDeadError, RequestError
from vllm_clone.metrics.prometheus import HTTPMetrics


def routes_of(app: FastAPI) -> list[tuple[str, list[str]]]:
    """Path and methods of every route, sorted."""
    found: set[tuple[str, tuple[str, ...]]] = set()
    pending: list[Any] = list(app.routes)
    while pending:
        route = pending.pop()
        inner = getattr(route, "original_router", None)  # newer FastAPI versions nest included routers
        if inner is not None:
            pending += inner.routes
        elif getattr(route, "methods", None):
            found.add((route.path, tuple(sorted(route.methods))))
    return [(path, list(methods)) for path, methods in sorted(found)]


def build_app(
    engine: AsyncLLM,
    config: VllmConfig,
    frontend: FrontendConfig,
    registry: CollectorRegistry,
    shown: CollectorRegistry | None = None,
    board: Board | None = None,
) -> FastAPI:
    """The application over an engine. HTTP series go into ``registry``.

    Args:
        shown: what /metrics shows when that is more than ``registry``: the series of all API servers.
        board: what the API servers tell each other.

    Raises:
        ConfigError: the chat template cannot be read.
    """
    shown = registry if shown is None else shown
    serving, load = Serving(engine, config, frontend), Load(board)
    docs: dict[str, Any] = {}
    if frontend.disable_fastapi_docs:
        docs = {"openapi_url": None, "docs_url": None, "redoc_url": None}
    elif frontend.enable_offline_docs:
        docs = {"docs_url": None, "redoc_url": None}
    app = FastAPI(**docs)
    app.root_path = frontend.root_path or ""
    app.state.log_error_stack = frontend.log_error_stack
    if frontend.enable_offline_docs:
        app.add_api_route("/docs", _offline_docs, include_in_schema=False)
    app.include_router(openai_routes(serving, load, shown))
    app.include_router(service_routes(serving, load, shown))
    app.include_router(token_routes(serving))
    app.include_router(operator_routes(serving))
    app.add_exception_handler(RequestError, errors.on_request_error)
    app.add_exception_handler(EngineDeadError, errors.on_request_error)
    app.add_exception_handler(errors.ContentTypeError, errors.on_content_type_error)
    app.add_exception_handler(RequestValidationError, errors.on_validation_error)
    app.add_exception_handler(Exception, errors.on_request_error)
    app.add_middleware(LastResort)
    app.add_middleware(BodyLimit)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=frontend.allowed_origins,
        allow_credentials=frontend.allow_credentials,
        allow_methods=frontend.allowed_methods,
        allow_headers=frontend.allowed_headers,
    )
    app.add_middleware(RequestMetrics, metrics=HTTPMetrics(registry))
    keys = frontend.api_key or [key for key in [envs.VLLM_API_KEY] if key]
    if keys:
        app.add_middleware(Authentication, keys=keys)
    if frontend.enable_request_id_headers:
        app.add_middleware(RequestIdHeader)
    for name in frontend.middleware:
        layer: Any = load_middleware(name)
        if inspect.isclass(layer):
            app.add_middleware(layer)  # type: ignore[arg-type,unused-ignore]
        else:
            app.middleware("http")(layer)
    return app


async def _offline_docs() -> HTMLResponse:
    return HTMLResponse(offline_docs.PAGE)


def load_middleware(name: str) -> Any:
    """The ASGI class, or the async function of request and call_next, that ``--middleware`` names.

    Raises:
        ConfigError: it is neither, or cannot be imported.
    """
    layer = import_named("--middleware", name)
    if not (inspect.isclass(layer) or inspect.iscoroutinefunction(layer)):
        raise ConfigError(f"--middleware {name}: is neither a class nor an async function.")
    return layer
