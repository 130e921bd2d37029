"""The thread that turns step results into texts and outputs, and delivers them to their receivers.

Knows the output processor and receivers. Must not know the engine, which it notifies through `EngineCalls`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxpage.async_llm.streams import Receiver, Update
from jaxpage.engine.step_output import StepOutput, TextEnd
from jaxpage.mailbox import Mailbox
from jaxpage.output_processor import OutputProcessor
from jaxpage.outputs import RequestOutput
from jaxpage.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineCalls:
    """What the output thread asks of the engine. Neither call blocks."""

    end_by_text: Callable[[list[TextEnd]], None]
    abort: Callable[[list[str]], None]


class Observer(Protocol):
    """Collects metrics of requests and steps. Called in the output thread, so it must be quick.

    Steps identify a request by `request.request_id`; outputs have the caller's name for it.
    """

    def added(self, request: Request) -> None:
        """A request is about to be queued. It ends as `finished` or as `dropped`."""
        ...

    def took_step(self, step: StepOutput) -> None:
        """A step has been collected, possibly without any output."""
        ...

    def finished(self, request: Request, output: RequestOutput) -> None:
        """A request has ended; `output` is its last one."""
        ...

    def dropped(self, request: Request, error: Exception | None) -> None:
        """A request has ended without a last output: with an error, or because its receiver was closed."""
        ...


class OutputLoop:
    """Processes steps in order and delivers their outputs. Everything but `post` runs in its thread."""

    def __init__(
        self,
        processor: OutputProcessor,
        engine: EngineCalls,
        ended: Callable[[str, str], None],
    ):
        """`ended` is called with the caller's name and the id of each request that has ended."""
        self.observers: list[Observer] = []
        self._processor = processor
        self._engine = engine
        self._ended = ended
        self._mailbox = Mailbox()
        self._requests: dict[str, _Delivery] = {}
        self._is_stopped = False

    def post(self, action: Callable[[], object]) -> None:
        """Call `action` in the loop's thread, after everything that was posted before."""
        self._mailbox.post(action)

    def run(self) -> None:
        """Run until `stop`."""
        while not self._is_stopped:
            self._mailbox.run(wait=True)
            self._deliver_outputs()

    def run_failed(self, error: Exception) -> None:
        """Run until `stop` after `run` has raised: all requests get the error, also those that are yet to be added."""
        with contextlib.suppress(Exception):
            self._deliver_outputs()
        self._fail(list(self._requests), error)
        while not self._is_stopped:
            with contextlib.suppress(Exception):  # what is broken may raise for every step
                self._mailbox.run(wait=True)
            self._fail(list(self._requests), error)

    def stop(self) -> None:
        self._is_stopped = True

    def add(self, request: Request, name: str, receiver: Receiver) -> None:
        """Expect tokens of a request. `name` is the caller's name for it, which differs from the engine's id."""
        self._requests[request.request_id] = _Delivery(request, name, receiver)
        self._tell(lambda observer: observer.added(request))
        try:
            self._processor.add(request)
        except Exception as error:  # raised by the tokenizer, for the end of the prompt
            self._give_up({request.request_id: error})

    def take(self, step: StepOutput) -> None:
        """Process a step."""
        processed = self._processor.process(step)
        if processed.text_ends:
            self._engine.end_by_text(processed.text_ends)
        if processed.unwanted:
            self._engine.abort(processed.unwanted)
        if processed.errors:
            self._give_up(processed.errors)
        self._tell(lambda observer: observer.took_step(step))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with the tokens they have; their last outputs have the finish reason "abort"."""
        self._processor.abort(request_ids)

    def discard(self, request_id: str) -> None:
        """Forget a request whose receiver was closed."""
        self._processor.discard(request_id)
        self._drop(request_id, None)

    def fail(self, request_ids: Collection[str], error: Exception) -> None:
        """End requests with an exception, after the tokens that they have."""
        self._deliver_outputs()
        self._fail(request_ids, error)

    def fail_all(self, error: Exception) -> None:
        """`fail` for all requests."""
        self.fail(list(self._requests), error)

    def _give_up(self, errors: Mapping[str, Exception]) -> None:
        """Fail requests whose text cannot be made."""
        self._engine.abort(list(errors))
        for request_id, error in errors.items():
            message = "request %s cannot be detokenised: %r"
            logger.error(message, request_id, error, exc_info=error)
            self._fail([request_id], error)

    def _fail(self, request_ids: Collection[str], error: Exception) -> None:
        for request_id in request_ids:
            self._processor.discard(request_id)
        self._deliver([(request_id, error) for request_id in request_ids])

    def _deliver_outputs(self) -> None:
        outputs: list[tuple[str, Update]] = []
        errors: dict[str, Exception] = {}
        for request_id in self._processor.unreported_ids:
            try:
                outputs.append((request_id, self._processor.take_one(request_id)))
            except Exception as error:  # raised by the tokenizer, at the end or for logprobs
                errors[request_id] = error
        self._deliver(outputs)
        if errors:
            self._give_up(errors)

    def _deliver(self, updates: list[tuple[str, Update]]) -> None:
        """Wakes each event loop once, however many of its requests have updates."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Receiver, Update]]] = {}
        for request_id, item in updates:
            delivery = self._requests.get(request_id)
            if delivery is None:
                continue
            self._prepare(delivery, item)
            loop = delivery.receiver.loop
            if loop is None:
                delivery.receiver.receive(item)
            else:
                by_loop.setdefault(loop, []).append((delivery.receiver, item))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_receive, items)
            except RuntimeError:  # the loop is closed, and so are its receivers
                self._abandon(loop)

    def _prepare(self, delivery: _Delivery, item: Update) -> None:
        if isinstance(item, Exception):
            self._drop(delivery.request.request_id, item)
            return
        item.request_id = delivery.name
        if item.finished:
            self._end(delivery.request.request_id)
            self._tell(lambda observer: observer.finished(delivery.request, item))

    def _drop(self, request_id: str, error: Exception | None) -> None:
        delivery = self._end(request_id)
        if delivery is not None:
            self._tell(lambda observer: observer.dropped(delivery.request, error))

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        """A failing observer must not affect any request."""
        for observer in self.observers:
            try:
                tell(observer)
            except Exception:
                logger.exception("%s has failed", type(observer).__name__)

    def _end(self, request_id: str) -> _Delivery | None:
        delivery = self._requests.pop(request_id, None)
        if delivery is not None:
            self._ended(delivery.name, request_id)
        return delivery

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        ids = [i for i, delivery in self._requests.items() if delivery.receiver.loop is loop]
        self._engine.abort(ids)
        for request_id in ids:
            self.discard(request_id)


class _Delivery(NamedTuple):
    """Where the outputs of a request go."""

    request: Request
    name: str  # the caller's
    receiver: Receiver


def _receive(items: list[tuple[Receiver, Update]]) -> None:
    for receiver, item in items:
        receiver.receive(item)
