"""The application: its routes, and how errors are returned."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from jaxpage import __version__
from jaxpage.async_llm import EngineAsleepError, EngineDeadError
from jaxpage.server import admin, message_routes, operation, response_routes, rl, tokens, trl
from jaxpage.server.access_log import AccessLog
from jaxpage.server.batch import Caller
from jaxpage.server.chat import ChatCall
from jaxpage.server.completions import CompletionCall
from jaxpage.server.context import Server
from jaxpage.server.error_response import error_response
from jaxpage.server.errors import ApiError, to_answer_error, to_api_error
from jaxpage.server.generate import GenerateCall
from jaxpage.server.limits import BodyLimit, KeyCheck
from jaxpage.server.page import page_router
from jaxpage.server.protocol.chat import ChatRequest
from jaxpage.server.protocol.completions import CompletionRequest
from jaxpage.server.protocol.pooling import POOLING_PATHS
from jaxpage.server.protocol.responses import ResponsesRequest
from jaxpage.server.protocol.tokens import GenerateRequest
from jaxpage.server.responses import ResponseCall
from jaxpage.server.streaming import (
    Call,
    Events,
    EventStream,
    named_events,
    plain_events,
    until_disconnected,
)
from jaxpage.server.tracing import trace_headers


def make_app(server: Server) -> FastAPI:
    """An ASGI application for one server."""
    app = empty_app(server)
    _add_calls(app, server)  # first: routes are tried in their order
    app.include_router(operation.router(server))
    app.include_router(tokens.router(server))
    app.include_router(response_routes.router(server))
    app.include_router(message_routes.router(server, answer))
    app.include_router(admin.router(server))
    if server.options.enable_rl:
        app.include_router(rl.router(server))
        app.include_router(trl.router(server, answer))
    app.include_router(page_router(server.llm))
    add_checks(app, server)
    return app


def empty_app(server: Server) -> FastAPI:
    """An application that returns errors, without routes."""
    app = FastAPI(
        title="jaxpage", version=__version__, docs_url=None, redoc_url=None,
        exception_handlers={
            ApiError: _report,
            HTTPException: _report,
            RequestValidationError: _report,
            ValueError: _report,
            EngineAsleepError: _report,
            EngineDeadError: _report,
            # The last resort: besides the answer, a stack trace in the log, and the connection is closed.
            Exception: _report,
        },
    )  # fmt: skip
    app.state.server = server
    return app


def add_checks(app: FastAPI, server: Server) -> None:
    """Add what applies to every request: sizes, keys, metrics, the log."""
    options = server.options
    app.add_middleware(BodyLimit, max_size=options.max_body_size)
    app.add_middleware(
        KeyCheck,
        keys=options.keys(),
        admin_key=options.admin_api_key,
        nothing_open=options.api_key_for_all,
    )
    app.add_middleware(server.metrics.http.middleware)
    if not options.disable_access_log:
        app.add_middleware(AccessLog)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )


def _add_calls(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(server, body, request, CompletionCall.start)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(server, body, request, ChatCall.start)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await answer(server, body, request, ResponseCall.start, named_events)

    @app.post("/inference/v1/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        return await answer(server, body, request, GenerateCall.start)

    for path in POOLING_PATHS:
        app.add_api_route(path, _refuse_to_pool, methods=["POST"])


async def _refuse_to_pool(request: Request) -> Response:
    raise not_pooling(request.url.path)


def not_pooling(path: str) -> ApiError:
    """For a call of POOLING_PATHS to a model that generates."""
    return ApiError(
        400, f"{path} is for models that embed, classify or score; this one generates text"
    )


async def answer(
    server: Server,
    body: Any,
    request: Request,
    start: Callable[[Server, Any, Caller], Awaitable[Call]],
    events: Events = plain_events,
) -> Response:
    """Answer a call, completely or as a stream, as its body asks."""
    call_id = request.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex
    headers = {"X-Request-Id": call_id}
    try:
        caller = Caller(id=call_id[:256], trace_headers=trace_headers(request.headers))
        call = await start(server, body, caller)
    except (ValueError, TypeError) as error:
        raise to_api_error(error, frozenset(type(body).model_fields)) from error
    if body.stream:
        stream = EventStream(call, events, server.options.write_timeout)
        stream.headers.update(headers)
        return stream
    try:
        whole = await until_disconnected(request.receive, call)
    except Exception as error:
        raise to_answer_error(error) from error
    if whole is None:
        return Response(status_code=499)  # not sent to anyone
    return JSONResponse(whole, headers=headers)


async def _report(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error), request.scope)
