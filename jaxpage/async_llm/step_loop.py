"""The thread that owns the engine: it runs steps, and between them the calls that other threads post.

Knows the engine's methods and pausing. Must not know texts, outputs or their receivers: steps go to a `Sink`.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from jaxpage.engine.errors import EngineDeadError, StepFailedError
from jaxpage.engine.step_output import StepOutput
from jaxpage.engine.verbs import EngineVerbs
from jaxpage.hosts.errors import HostLostError
from jaxpage.mailbox import Mailbox
from jaxpage.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_UNREAD_STEPS = 8  # how far the engine may be ahead of the output thread


class PauseMode(enum.StrEnum):
    """What happens to requests while generation is paused; vLLM's names."""

    ABORT = "abort"  # they end with the tokens they have
    WAIT = "wait"  # running ones are finished, new ones wait
    KEEP = "keep"  # all are suspended


class Sink(Protocol):
    """Where results go. No method blocks."""

    def take(self, step: StepOutput) -> None:
        """Process a step, and call `StepLoop.read_one` when that is done."""
        ...

    def fail(self, request_ids: list[str], error: Exception) -> None:
        """These requests have failed."""
        ...

    def fail_all(self, error: Exception) -> None:
        """All requests have failed."""
        ...


class StepLoop:
    """Runs an engine. Everything but the methods of the first group runs in its thread."""

    def __init__(self, engine: EngineVerbs, sink: Sink):
        self.error: EngineDeadError | None = None  # once it is dead
        self._engine = engine
        engine.keep_pace()
        self._sink = sink
        self._mailbox = Mailbox()
        self._unread = threading.Semaphore(MAX_UNREAD_STEPS)
        self._pause: PauseMode | None = None
        self._held: dict[str, Request] = {}  # arrived while paused
        self._waiting_for_pause: list[Future[None]] = []  # of callers of `pause`
        self._is_stopped = False

    # From any thread.

    def post(self, action: Callable[[], object]) -> None:
        """Call `action` between two steps. It must not raise."""
        self._mailbox.post(action)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Call `action` between two steps; a future of its result. EngineDeadError once the thread has ended."""
        return self._mailbox.call(action)

    def read_one(self) -> None:
        """A step has been processed."""
        self._unread.release()

    def read_all(self) -> None:
        """No further steps will be processed: never block on them."""
        self._unread.release(MAX_UNREAD_STEPS)

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    # In the loop's thread.

    def run(self) -> None:
        """Run until `stop`."""
        try:
            while not self._is_stopped:
                self._engine.sleep_until_due()
                self._mailbox.run(wait=not (self._may_step() or self._must_collect()))
                if self._is_stopped:
                    break
                if self._may_step():
                    self._step(self._engine.step)
                elif self._must_collect():
                    self._step(self._engine.collect)
                if not (self._may_step() or self._must_collect()):
                    self._release_waiting()
        except BaseException as error:
            logger.exception("the engine's thread has failed")
            self._die(EngineDeadError(f"the engine's thread has failed: {error!r}"))
            raise
        finally:
            try:
                self._mailbox.close(self.error or EngineDeadError("the engine's thread has ended"))
            finally:
                self._release_waiting()  # last: closing the mailbox may still call `pause`

    def stop(self, error: EngineDeadError) -> None:
        """Stop the thread. Unfinished requests get the error."""
        self._is_stopped = True
        self._die(error)

    def lose_hosts(self, error: Exception) -> None:
        """Hosts of the engine are lost, so nothing can be computed."""
        self._die(EngineDeadError(str(error)))

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that can never run, EngineDeadError if the engine is dead."""
        if self.error is not None:
            raise self.error
        if self._pause is not None:
            self._held[request.request_id] = request
        else:
            self._engine.add(request)

    def abort(self, request_ids: list[str]) -> None:
        """End requests with the tokens they have; unknown ids are ignored."""
        if self.error is not None:
            return  # all have ended
        for request_id in request_ids:
            if self._held.pop(request_id, None) is None:
                self._engine.abort(request_id)

    def abort_all(self) -> list[str]:
        """Abort all requests; returns their ids."""
        ids = [*self._held, *self._engine.unfinished_ids]
        self.abort(ids)
        return ids

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop adding requests. The future is done when nothing runs on the device."""
        self._pause = mode
        future: Future[None] = Future()
        self._waiting_for_pause.append(future)
        return future

    def check_suspended(self) -> None:
        """Raise RuntimeError if a step runs, or may run before `resume`."""
        if self._pause is None or self._may_step() or self._must_collect():
            raise RuntimeError(
                "steps still run, so the engine cannot sleep: meanwhile another caller has resumed generation, or "
                "asked for a pause in mode 'wait'; call sleep again"
            )

    def resume(self) -> None:
        """Continue, including the requests that arrived during the pause."""
        self._pause = None
        held, self._held = self._held, {}
        for request in held.values():
            try:
                self._engine.add(request)
            except ValueError as error:
                self._sink.fail([request.request_id], error)

    def _may_step(self) -> bool:
        if self.error is not None or self._pause is PauseMode.KEEP:
            return False
        return self._engine.has_unfinished_requests()

    def _must_collect(self) -> bool:
        """Whether a step is still in flight although requests are suspended."""
        is_kept = self.error is None and self._pause is PauseMode.KEEP
        return is_kept and self._engine.has_step_in_flight

    def _step(self, move_on: Callable[[], StepOutput]) -> None:
        self._unread.acquire()
        try:
            output = move_on()
        except Exception as error:
            self._unread.release()
            self._fail(error)
        else:
            self._sink.take(output)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, HostLostError):
            logger.error("%s", error)
            self._sink.fail(self._engine.take_failed(), EngineDeadError(str(error)))
            self.lose_hosts(error)
            return
        logger.exception("a step has failed")
        failed = StepFailedError(f"the step that computed this request failed: {error}")
        self._sink.fail(self._engine.take_failed(), failed)
        death = self._engine.death
        if death is not None:
            self._die(EngineDeadError(f"{death}: {error}"))

    def _release_waiting(self) -> None:
        waiting, self._waiting_for_pause = self._waiting_for_pause, []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _die(self, error: EngineDeadError) -> None:
        self.error = self.error or error
        try:
            self._held.clear()
            for request_id in list(self._engine.unfinished_ids):
                self._try_to_abort(request_id)
        finally:
            self._sink.fail_all(self.error)

    def _try_to_abort(self, request_id: str) -> None:
        try:
            self._engine.abort(request_id)
        except Exception:
            logger.exception("request %s cannot be aborted", request_id)
