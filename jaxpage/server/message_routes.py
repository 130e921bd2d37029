"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpage.server.context import Server
from jaxpage.server.error_response import MESSAGES_PATH
from jaxpage.server.messages import MessageCall, count_tokens
from jaxpage.server.protocol.messages import CountTokensRequest, MessagesRequest
from jaxpage.server.streaming import named_events


def router(server: Server, answer: Callable[..., Awaitable[Response]]) -> APIRouter:
    """`answer`: see `app.answer`."""
    routes = APIRouter(prefix=MESSAGES_PATH)

    @routes.post("")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        response = await answer(server, body, request, MessageCall.start, named_events)
        # Where Anthropic's clients look for it.
        response.headers["request-id"] = response.headers.get("x-request-id", "")
        return response

    @routes.post("/count_tokens")
    async def count(body: CountTokensRequest) -> dict[str, Any]:
        return await count_tokens(server, body)

    return routes
