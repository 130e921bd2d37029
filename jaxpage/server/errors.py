"""Errors as OpenAI's API reports them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from jaxpage.async_llm import EngineAsleepError, EngineDeadError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_FIELD = re.compile(r"(?:prompt \d+ of \d+: )?(?:the )?([a-z_]+)\b")
# The message of `prompts.too_long`. The prompt may be from any of several fields, so the error has vLLM's names for it.
_TOO_LONG = re.compile(
    r"(?:prompt \d+ of \d+: )?This model's maximum context length is \d+ tokens\. "
    r"However, your prompt contains \d+ (input tokens|characters)"
)
_TOO_LONG_PARAMS = {"input tokens": "input_tokens", "characters": "input_text"}
_MAX_MESSAGE_LEN = 2000  # characters; messages may quote the client's input


class ApiError(Exception):
    """An error that the client gets instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        message = self.message
        if len(message) > _MAX_MESSAGE_LEN:
            message = f"{message[:_MAX_MESSAGE_LEN]}..."
        # A message may quote the client's input, and JSON allows no lone surrogates.
        message = message.encode(errors="replace").decode()
        error_type = _TYPES.get(self.status, "APIError")
        return {
            "error": {
                "message": message,
                "type": error_type,
                "param": self.param,
                "code": self.status,
            }
        }


def to_api_error(error: BaseException, fields: frozenset[str] = frozenset()) -> ApiError:
    """The client's error for any exception, without internals of the server.

    `fields`: the names of the request's fields; a ValueError's message may begin with one.
    """
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _of_validation(error)
        case HTTPException():
            return ApiError(error.status_code, _detail(error), headers=error.headers)
        case ValueError() | TypeError():
            return ApiError(400, str(error), param=_param(str(error), fields))
        case EngineAsleepError():
            return ApiError(409, str(error))
        case EngineDeadError():
            return ApiError(503, str(error))
        case _:
            return _of_server(error)


def _detail(error: HTTPException) -> str:
    # FastAPI's own text for bodies that are no UTF-8, too deep or have too large numbers does not say which.
    cause = error.__cause__
    is_unread = error.status_code == 400 and isinstance(cause, ValueError | RecursionError)
    return f"the body cannot be read: {cause}" if is_unread else str(error.detail)


def _param(message: str, fields: frozenset[str]) -> str | None:
    if too_long := _TOO_LONG.match(message):
        return _TOO_LONG_PARAMS[too_long[1]]
    found = _FIELD.match(message)
    return found[1] if found and found[1] in fields else None


def to_answer_error(error: BaseException) -> ApiError:
    """The same after a request was accepted: from then on a ValueError is not the client's fault."""
    return _of_server(error) if isinstance(error, ValueError | TypeError) else to_api_error(error)


def _of_server(error: BaseException) -> ApiError:
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer this request; its log says why")


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first validation errors, each with its location."""
    complaints = []
    # FastAPI parses JSON by its type, and passes on other bodies as they are.
    if isinstance(error.body, bytes):
        return ApiError(400, "the body must be JSON with the header Content-Type: application/json")
    if error.errors()[0]["type"] == "json_invalid":
        where = error.errors()[0]["loc"][-1]
        return ApiError(
            400, f"the body is no JSON: {error.errors()[0]['ctx']['error']}, at {where}"
        )
    for entry in error.errors()[:5]:
        where = ".".join(str(part) for part in entry["loc"] if part != "body")
        complaints.append(f"{where or 'the body'}: {entry['msg']}")
    first = [str(part) for part in error.errors()[0]["loc"] if part not in ("body", "query")]
    return ApiError(400, "; ".join(complaints), param=first[0] if first else None)
