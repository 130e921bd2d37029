"""An HTTP request as a serializable value, and the answer of an ASGI application to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope

logger = logging.getLogger(__name__)

_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP request, and what a router needs to know about it."""

    scope: dict[str, Any]  # the serializable part of the ASGI scope
    body: bytes
    prefix: tuple[bytes, ...] = ()  # see `prefix_keys`
    avoid: frozenset[str] = frozenset()  # replicas that failed to answer it

    @property
    def path(self) -> str:
        """The path without the prefix under which the application is mounted."""
        return self.scope["path"].removeprefix(self.scope.get("root_path", ""))


@dataclass(frozen=True, kw_only=True)
class WholeAnswer:
    """The answer of one replica."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ReplicaFailedError(Exception):
    """A replica did not answer, or not completely: it or its machine died."""


async def read_call(scope: Scope, receive: Receive) -> Call | None:
    """The whole request. None if the client disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    plain = {name: scope[name] for name in _SCOPE if name in scope}
    return Call(scope=plain | {"headers": list(scope["headers"])}, body=bytes(body))


async def messages(app: ASGIApp, call: Call) -> AsyncGenerator[list[Message], None]:
    """The answer of an application, as it comes; several messages at a time if they come faster than they are consumed.

    Closing the generator acts like a client that disconnects: the application is cancelled. Raises the application's
    exception, unless the answer was complete.
    """
    queue: asyncio.Queue[Message | None] = asyncio.Queue()
    unread: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        return unread.pop() if unread else await asyncio.Future()

    task = asyncio.ensure_future(_run(app, dict(call.scope), receive, queue))
    try:
        is_complete = False
        while True:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            found = [message for message in batch if message is not None]
            is_complete |= any(_is_last(message) for message in found)
            if found:
                yield found
            if batch[-1] is None:
                break
        error = task.exception()
        if error is not None and not is_complete:
            raise error
    finally:
        task.cancel()
        await asyncio.wait([task])  # until its requests are aborted
        if not task.cancelled() and task.exception() is not None:
            logger.debug("an application was cut off", exc_info=task.exception())


async def _run(
    app: ASGIApp, scope: Scope, receive: Receive, queue: asyncio.Queue[Message | None]
) -> None:
    try:
        await app(scope, receive, queue.put)
    finally:
        # Through the loop, so that the task has ended when this is read.
        asyncio.get_running_loop().call_soon(queue.put_nowait, None)


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body")


async def whole_answer(app: ASGIApp, call: Call, replica: str) -> WholeAnswer:
    """The complete answer."""
    status, headers, body = 500, [], bytearray()
    async for batch in messages(app, call):
        for message in batch:
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message.get("headers", ()))
            elif message["type"] == "http.response.body":
                body += message.get("body", b"")
    return WholeAnswer(replica=replica, status=status, headers=headers, body=bytes(body))
