"""Outputs on their way from the engine's threads to the callers.

A slow reader costs no memory: an update that arrives before the previous one was read is merged with it.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Protocol

from jaxpage.outputs import RequestOutput
from jaxpage.request import Request
from jaxpage.sampling_params import RequestOutputKind

Update = RequestOutput | Exception


class Receiver(Protocol):
    """Where the outputs of one request go."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that calls `receive`. None: it is called in the output thread."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the caller no longer waits."""
        ...

    def open(self, request: Request, discard: Callable[[], None]) -> None:
        """The request is about to be added; call `discard`, which forgets it, once the caller no longer waits."""
        ...

    def receive(self, update: Update) -> None:
        """Receive an output, or the exception that ends the request. Must not block."""
        ...


class Stream:
    """The outputs of one request, for one task to iterate over: `async for output in stream`.

    Belongs to the event loop in which it was created. Closing it before its end aborts the request.
    """

    request: Request  # set by `open`

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_closed = False
        self._discard: Callable[[], None] | None = None
        self._output: RequestOutput | None = None  # not read yet
        self._error: Exception | None = None
        self._has_update = asyncio.Event()
        self._has_ended = False

    def open(self, request: Request, discard: Callable[[], None]) -> None:
        """See `Receiver`."""
        self.request = request
        self._discard = discard

    def receive(self, update: Update) -> None:
        """See `Receiver`."""
        if isinstance(update, Exception):
            self._error = update
        elif (
            self._output is not None and self.request.params.output_kind is RequestOutputKind.DELTA
        ):
            self._output = merge_deltas(self._output, update)
        else:
            self._output = update
        self._has_update.set()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Raises StepFailedError or EngineDeadError if the request failed."""
        if self._has_ended:
            raise StopAsyncIteration
        await self._has_update.wait()
        output, self._output = self._output, None
        if output is None:
            self._has_ended = True
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._has_update.clear()
        self._has_ended = output.finished
        return output

    def close(self) -> None:
        """Stop reading. Aborts the request if it has not ended."""
        self.is_closed = True
        if not self._has_ended and self._discard is not None:
            self._discard()
        self._has_ended = True


class LastOutput:
    """A future of the last output of one request; cancelling it aborts the request."""

    loop = None

    def __init__(self) -> None:
        self.future: Future[RequestOutput] = Future()

    @property
    def is_closed(self) -> bool:
        return self.future.cancelled()

    def open(self, request: Request, discard: Callable[[], None]) -> None:
        """See `Stream`."""
        self.future.add_done_callback(lambda future: discard() if future.cancelled() else None)

    def receive(self, update: Update) -> None:
        """See `Receiver`. May be called from any thread; what comes after the end is ignored."""
        with suppress(InvalidStateError):  # it was cancelled, or has ended
            if isinstance(update, Exception):
                self.future.set_exception(update)
            elif update.finished:
                self.future.set_result(update)


def merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two consecutive deltas of a request as one."""
    merged = copy.copy(second)
    merged.outputs = first.outputs
    merged.add(second, aggregate=True)
    merged.outputs.sort(key=lambda completion: completion.index)
    return merged
