"""Answers in pieces: server-sent events as OpenAI's, `data: {...}` and at the end `data: [DONE]`.

Those of responses and of Anthropic's messages have names, and a last one that says how it ended: no `[DONE]` follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from jaxpage.server.errors import to_answer_error

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Call(Protocol):
    """An answer on its way."""

    async def response(self) -> dict[str, Any]:
        """The whole of it."""
        ...

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """In pieces."""
        ...

    def close(self) -> None:
        """Nobody waits for it any more: abort what has not ended."""
        ...


Events = Callable[[Call], AsyncIterator[bytes]]  # the chunks of a call as events


class EventStream(StreamingResponse):
    """The chunks of a call. However it ends, the call is closed: a client that goes away aborts its requests."""

    def __init__(self, call: Call, events: Events, write_timeout: float):
        super().__init__(events(call), media_type="text/event-stream", headers=_HEADERS)
        self._call = call
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = _Reader(self._write_timeout)
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(reader.lose)

        async def send_in_time(message: Message) -> None:
            reader.waits_since = reader.loop.time()
            await send(message)
            reader.waits_since = None

        try:
            await self.stream_response(send_in_time)
        except asyncio.CancelledError:
            if not reader.is_lost:
                raise
        finally:
            reader.close()
            gone.cancel()
            self._call.close()


class _Reader:
    """Who reads an answer. Cancels the task that made it if the client goes away, or reads nothing for too long.

    One timer for all that is written: asyncio's timeouts cost as much as the events.
    """

    def __init__(self, patience: float):
        """`patience`: seconds."""
        self.loop = asyncio.get_running_loop()
        self.waits_since: float | None = None  # until when something could not be written
        self.is_lost = False
        self._task = asyncio.current_task()
        self._patience = patience
        self._timer = self.loop.call_later(patience, self._check)
        self._is_closed = False

    def lose(self, gone: asyncio.Future[None] | None = None) -> None:
        """The client is not there any more."""
        if self._is_closed or (gone is not None and gone.cancelled()):
            return
        assert self._task is not None
        self.is_lost = True
        self._task.cancel()

    def close(self) -> None:
        """The answer has ended."""
        self._is_closed = True
        self._timer.cancel()
        if self.is_lost and self._task is not None:
            self._task.uncancel()

    def _check(self) -> None:
        now = self.loop.time()
        waited = 0.0 if self.waits_since is None else now - self.waits_since
        if waited >= self._patience:
            self.lose()
        else:
            self._timer = self.loop.call_later(self._patience - waited, self._check)


async def plain_events(call: Call) -> AsyncIterator[bytes]:
    """Of completions and chats."""
    try:
        async for chunk in call.chunks():
            yield event(chunk)
    except Exception as error:  # the status went out long ago
        yield event(to_answer_error(error).body())
    yield b"data: [DONE]\n\n"


async def named_events(call: Call) -> AsyncIterator[bytes]:
    """Of responses and messages, whose chunks say what they are, and report errors themselves."""
    async for chunk in call.chunks():
        yield event(chunk, chunk["type"])


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


async def until_disconnected(receive: Receive, call: Call) -> dict[str, Any] | None:
    """The whole answer; None if the client went away before. Closes the call."""
    answer = asyncio.ensure_future(call.response())
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        for task in (answer, gone):
            task.cancel()
        call.close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
