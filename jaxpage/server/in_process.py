"""Answers requests without HTTP, for batch files."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from jaxpage.async_llm import AsyncLLM, EngineDeadError
from jaxpage.server.batch import Caller
from jaxpage.server.chat import ChatCall
from jaxpage.server.completions import CompletionCall
from jaxpage.server.context import Server
from jaxpage.server.errors import ApiError, to_answer_error, to_api_error
from jaxpage.server.options import ServerOptions
from jaxpage.server.protocol.chat import ChatRequest
from jaxpage.server.protocol.completions import CompletionRequest
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
    options = ServerOptions(max_queued_requests=2**31, served_model_name=model_names)
    server = Server.of(llm, options)

    async def answer(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        fields: frozenset[str] = frozenset()
        try:
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
