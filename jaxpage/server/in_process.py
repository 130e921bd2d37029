"""Answers requests without HTTP, for batch files."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from jaxpage.async_llm import AsyncLLM, EngineDeadError
from jaxpage.pooling.async_pooler import AsyncPooler
from jaxpage.server.app import not_pooling
from jaxpage.server.batch import Caller
from jaxpage.server.chat import ChatCall
from jaxpage.server.completions import CompletionCall
from jaxpage.server.context import Server
from jaxpage.server.errors import ApiError, to_answer_error, to_api_error
from jaxpage.server.options import ServerOptions
from jaxpage.server.pooling import make_pooling_app
from jaxpage.server.protocol.chat import ChatRequest
from jaxpage.server.protocol.completions import CompletionRequest
from jaxpage.server.protocol.pooling import POOLING_PATHS
from jaxpage.server.protocol.responses import ResponsesRequest
from jaxpage.server.responses import ResponseCall

Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]

_CALLS: dict[str, tuple[Any, Any]] = {
    "/v1/completions": (CompletionRequest, CompletionCall.start),
    "/v1/chat/completions": (ChatRequest, ChatCall.start),
    "/v1/responses": (ResponsesRequest, ResponseCall.start),
}


def answerer(llm: AsyncLLM, model_names: tuple[str, ...] = ()) -> Answer:
    """A function from a path and a body to a status and a body. It raises only EngineDeadError.

    `model_names`: those that bodies may have; none: the model's own.
    """
    server = Server.of(llm, _options(model_names))

    async def answer(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        fields: frozenset[str] = frozenset()
        try:
            if url in POOLING_PATHS:
                raise not_pooling(url)
            if url not in _CALLS:
                raise ApiError(404, f"{url} is not served here; there is {', '.join(_CALLS)}")
            model, start = _CALLS[url]
            fields = frozenset(model.model_fields)
            try:
                parsed = model.model_validate(body)
            except ValidationError as error:
                raise RequestValidationError(error.errors()) from None
            if parsed.stream:
                raise ApiError(400, "stream=true has no use here", param="stream")
            call = await start(server, parsed, Caller(id=uuid.uuid4().hex))
            try:
                return 200, await call.response()
            except (ValueError, TypeError) as error:
                raise to_answer_error(error) from error
            finally:
                call.close()
        except EngineDeadError:
            raise
        except Exception as error:
            api_error = to_api_error(error, fields)
            return api_error.status, api_error.body()

    return answer


def pooling_answerer(llm: AsyncPooler, model_names: tuple[str, ...] = ()) -> Answer:
    """The same for a pooling model."""
    app, _ = make_pooling_app(llm, _options(model_names))

    async def answer(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        found = await _post(app, url, body)
        await llm.check_health()
        return found

    return answer


def _options(model_names: tuple[str, ...]) -> ServerOptions:
    """Those without limits on what may wait, and without a line for each request."""
    return ServerOptions(
        served_model_name=model_names,
        max_queued_requests=2**31,
        max_body_size=2**40,
        disable_access_log=True,
    )


async def _post(app: Any, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Call an ASGI application. Returns the status and the JSON of its answer."""
    left = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Future()  # for as long as the client stays
        return left.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    try:
        await app(scope, receive, send)
    except Exception:
        # Starlette sends the 500 of the application's handler, which logs the error, and then raises it again.
        if not sent:
            raise
    return sent[0]["status"], json.loads(b"".join(each.get("body", b"") for each in sent))
