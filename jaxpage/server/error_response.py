"""An error as the answer to a request: OpenAI's format, or for `/v1/messages` Anthropic's.

Anthropic's is `{"type": "error", "error": {"type", "message"}, "request_id"}`, with statuses and types of its own.
"""

from __future__ import annotations

import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from jaxpage.server.errors import ApiError
from jaxpage.server.streaming import event

MESSAGES_PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def path_of(scope: Scope) -> str:
    """The path as Starlette routes it: without a proxy's prefix, which ends before a "/"."""
    path, prefix = scope["path"], scope.get("root_path", "")
    return path[len(prefix) :] if path.startswith(f"{prefix}/") else path


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """The answer to the request of `scope`, in the format of its path."""
    if not _is_anthropic_s(scope):
        return JSONResponse(error.body(), error.status, error.headers)
    request_id = _request_id(scope)
    headers = error.headers | {"request-id": request_id}
    return JSONResponse(anthropic_body(error, request_id), _status(error), headers)


def last_events(error: ApiError, scope: Scope) -> bytes:
    """The end of a stream that breaks off, in the format of its path."""
    if _is_anthropic_s(scope):
        return event(anthropic_body(error, _request_id(scope)), "error")
    return event(error.body()) + b"data: [DONE]\n\n"


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object. Other 4xx than it has are "invalid_request_error", other 5xx "api_error"."""
    status = _status(error)
    other = "invalid_request_error" if status < 500 else "api_error"
    detail = {"type": _TYPES.get(status, other), "message": error.body()["error"]["message"]}
    return {"type": "error", "error": detail, "request_id": request_id}


def _is_anthropic_s(scope: Scope) -> bool:
    path = path_of(scope)
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def _request_id(scope: Scope) -> str:
    return Headers(scope=scope).get("x-request-id") or f"req_{uuid.uuid4().hex}"


def _status(error: ApiError) -> int:
    """Anthropic has 529 for an overload, of which the sign is that the client may try again."""
    return 529 if error.status == 503 and "Retry-After" in error.headers else error.status
