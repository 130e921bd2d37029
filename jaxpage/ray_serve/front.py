"""The application in front of all replicas: forwards a request to one replica, and to another if that fails.

Knows no model and nothing about Ray. Answers are those of `jaxpage serve`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from jaxpage.ray_serve.call import Call, ReplicaFailedError, WholeAnswer, read_call
from jaxpage.ray_serve.prefix import prefix_keys
from jaxpage.ray_serve.together import EVERYWHERE, together
from jaxpage.server.error_response import error_response, last_events
from jaxpage.server.errors import ApiError
from jaxpage.server.limits import BodyLimit

_BUSY = (503, 529)  # the second is Anthropic's
_RETRY_AFTER = {"Retry-After": "1"}


class Replicas(Protocol):
    """The replicas that answer requests."""

    def answer(self, call: Call) -> AsyncGenerator[tuple[str, list[Message]], None]:
        """The id of the chosen replica and messages of its answer; first the id with no messages.

        Raises ReplicaFailedError.
        """
        ...

    async def answer_everywhere(self, call: Call) -> Sequence[WholeAnswer]:
        """The answers of all replicas. Raises ReplicaFailedError if one of them fails."""
        ...


def front_app(replicas: Replicas, max_body_size: int) -> Starlette:
    """An ASGI application; bodies of more than `max_body_size` bytes are rejected before they are forwarded."""
    return Starlette(
        routes=[Mount("/", app=Front(replicas))],
        middleware=[Middleware(BodyLimit, max_size=max_body_size)],
    )


class Front:
    """Forwards requests."""

    def __init__(self, replicas: Replicas):
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = await read_call(scope, receive)
        if call is None:
            return
        if call.path in EVERYWHERE:
            await self._everywhere(call, scope, receive, send)
            return
        call = dataclasses.replace(call, prefix=prefix_keys(call.body))
        answer = _Answer(send)
        avoid: frozenset[str] = frozenset()
        # The client has seen nothing yet, so another replica may start over.
        for is_last_try in (False, True):
            failed = await self._try(dataclasses.replace(call, avoid=avoid), answer, is_last_try)
            if failed is None:
                return
            avoid |= {failed}
            if answer.has_begun:
                break
        await answer.fail(scope, receive)

    async def _try(self, call: Call, answer: _Answer, is_last_try: bool) -> str | None:
        """None when the client has its answer; otherwise the replica that failed, "" if unknown."""
        replica = ""
        answer.forget()
        try:
            async with contextlib.aclosing(self._replicas.answer(call)) as parts:
                async for replica, messages in parts:
                    for message in messages:
                        if not is_last_try and message.get("status") in _BUSY:
                            return replica
                        await answer.send(message)
        except ReplicaFailedError:
            return replica
        return None

    async def _everywhere(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answers = await self._replicas.answer_everywhere(call)
        except ReplicaFailedError:
            answers = ()
        if answers:
            await together(call.path, answers)(scope, receive, send)
        else:
            await _Answer(send).fail(scope, receive)


class _Answer:
    """Sends the answer to a client. The status waits for the first part of the body: until then a retry is possible."""

    def __init__(self, send: Send):
        self.has_begun = False
        self._send = send
        self._start: Message | None = None

    def forget(self) -> None:
        self._start = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self.has_begun:
            assert self._start is not None
            await self._send(self._start)
            self.has_begun = True
        await self._send(message)

    async def fail(self, scope: Scope, receive: Receive) -> None:
        """Tell the client to try again. Raises ConnectionError if its answer has begun and is not an event stream."""
        error = ApiError(
            503, "the replica that was answering has failed; try again", headers=_RETRY_AFTER
        )
        if not self.has_begun:
            await error_response(error, scope)(scope, receive, self._send)
            return
        headers = dict(self._start["headers"]) if self._start else {}
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise ConnectionError(error.message)
        last = last_events(error, scope)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
