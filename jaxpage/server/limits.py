"""Checks of every HTTP request before it is processed: its key, and the size of its body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpage.server.error_response import error_response, path_of
from jaxpage.server.errors import ApiError

OPEN_PATHS = ("/health", "/live", "/ready", "/ping", "/metrics")  # for probes and scrapers
OPEN_PREFIXES = ("/page/assets/",)
ADMIN_PATHS = (
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
    "/abort_requests",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    # with --enable-rl
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/update_weights",
    "/weight_version",
    "/generate/",
    "/chat/",
    "/get_sequence_logprobs/",
    "/get_world_size/",
    "/init_communicator/",
    "/update_named_param/",
    "/close_communicator/",
)
_LINGER_BYTES = 2**20
_LINGER_SECONDS = 1.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class KeyCheck:
    """Rejects clients without a key: 401. Administrative paths need the admin key or, without one, a local client."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        admin_key: str | None,
        nothing_open: bool = False,
    ):
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._admin_key = admin_key.encode() if admin_key else None
        self._nothing_open = nothing_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            error = self._refusal(scope)
            if error is not None:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = path_of(scope)
        given = _keys_of(scope)
        if path in ADMIN_PATHS:
            return self._admin_refusal(scope, given)
        if not self._keys or self._is_open(path):
            return None
        if not self._is_among(given, [*self._keys, self._admin_key or b""]):
            return ApiError(
                401,
                'a key is needed: "Authorization: Bearer KEY" or "x-api-key: KEY"',
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def _admin_refusal(self, scope: Scope, given: Sequence[bytes]) -> ApiError | None:
        client = scope.get("client")
        if self._admin_key is not None:
            if self._is_among(given, [self._admin_key]):
                return None
            return ApiError(401, f"{scope['path']} needs the administrator's key")
        if client is None or client[0] in _LOOPBACK:
            return None
        return ApiError(
            403,
            f"{scope['path']} is for clients of the same machine; start the server with --admin-api-key for others",
        )

    def _is_open(self, path: str) -> bool:
        if self._nothing_open:
            return False
        return path in OPEN_PATHS or path == "/" or path.startswith(OPEN_PREFIXES)

    def _is_among(self, given: Sequence[bytes], keys: Sequence[bytes]) -> bool:
        """Whether one of `given` is. In constant time, whichever key matches, and however much of a key is right."""
        found = False
        for key in keys:
            for one in given:
                found |= bool(key) and hmac.compare_digest(one, key)
        return found


def _keys_of(scope: Scope) -> tuple[bytes, bytes]:
    """Where clients of OpenAI and of Anthropic write their key; some send both headers."""
    headers = Headers(scope=scope)
    kind, _, key = headers.get("authorization", "").partition(" ")
    bearer = key if kind.lower() == "bearer" else ""
    return bearer.strip().encode(), headers.get("x-api-key", "").strip().encode()


class BodyLimit:
    """Rejects larger bodies: 413, by their declared length, or as soon as more was received."""

    def __init__(self, app: ASGIApp, *, max_size: int):
        self._app = app
        self._max_size = max_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > self._max_size:
            await _discard(receive)
            await self._refuse(scope, receive, send)
            return
        size = 0

        async def count() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_size:
                if message.get("more_body"):
                    await _discard(receive)
                raise _TooLarge
            return message

        try:
            await self._app(scope, count, send)
        except _TooLarge:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            413,
            f"the body is larger than {self._max_size} bytes, the limit of --max-body-size",
            headers={"Connection": "close"},
        )
        await error_response(error, scope)(scope, receive, send)


async def _discard(receive: Receive) -> None:
    """Read what a client still sends, within limits. Closing a connection with unread data resets it, and the client
    may never see why it was rejected.
    """
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while size < _LINGER_BYTES:
                message = await receive()
                if not message.get("more_body"):
                    return
                size += len(message.get("body", b""))


class _TooLarge(BaseException):
    """Not an Exception, so that no handler takes it for a body that cannot be parsed."""
