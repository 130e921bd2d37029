"""One engine in a thread of its own: it takes what is asked of it between two steps, steps, and reports.

Knows an engine's verbs. Must not know the other replicas, nor what becomes of its reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TypeVar

from jaxpage.engine.engine import Engine
from jaxpage.engine.errors import EngineDeadError
from jaxpage.engine.step_output import StepOutput, TextEnd
from jaxpage.mailbox import Mailbox
from jaxpage.request import Request

T = TypeVar("T")

MAX_UNTAKEN = 2  # outputs that an engine may be ahead of whoever takes them


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a replica has to say. Reports are in the order in which things happened."""

    replica: int
    output: StepOutput | None = None
    forgotten: str | None = None  # a request of which no later report says anything
    error: BaseException | None = None  # that a step raised, or that ended the thread
    failed: list[str] = field(default_factory=list)  # ids of the requests which that step has ended
    is_last: bool = False  # the thread has ended


class Replica:
    """Runs an engine. The methods of the first group are for one other thread, the owner's."""

    def __init__(self, number: int, engine: Engine, reports: SimpleQueue[Report]):
        self.number, self.engine = number, engine
        self.error: BaseException | None = None  # which ended the thread
        self._reports = reports
        self._mailbox = Mailbox()
        # Commands posted and done; each is written by one thread only.
        self._num_posted = self._num_done = 0
        self._is_busy = False  # after the last command, or the last step
        self._is_held = False
        self._is_stopped = False
        self._num_untaken = 0
        name = f"jaxpage-replica-{number}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # In the owner's thread. Nothing happens once the thread has ended.

    def add(self, request: Request) -> None:
        """Queue a request for which there is room."""
        self._post(lambda: self.engine.add(request))

    def forget(self, request_id: str) -> None:
        """End a request if it has not ended, and report that it is forgotten."""

        def forget() -> None:
            self.engine.abort(request_id)
            self._reports.put(Report(replica=self.number, forgotten=request_id))

        self._post(forget)

    def end_by_text(self, end: TextEnd) -> None:
        """See `Engine.end_by_text`."""
        self._post(lambda: self.engine.end_by_text(end))

    def take_one(self) -> None:
        """Somebody has taken an output."""
        self._post(self._take_one)

    def hold(self) -> None:
        """Collect the step under way, and launch none until `release`."""

        def hold() -> None:
            self._is_held = True
            if self.engine.has_step_under_way:
                self._step(self.engine.collect)

        self._post(hold)

    def release(self) -> None:
        """Go on."""
        self._post(self._release)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have it called between two steps; EngineDeadError if the thread has failed."""

        def run() -> T:
            self._check()
            return function()

        if self._thread.is_alive():
            return self._mailbox.call(run)
        done: Future[T] = Future()
        try:
            done.set_result(run())
        except BaseException as error:
            done.set_exception(error)
        return done

    @property
    def has_done_all(self) -> bool:
        """Whether every command has been carried out, or never will be."""
        return self._num_done == self._num_posted

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do, and all that it had to say is reported."""
        # In this order: without commands, what is not busy does not become so.
        return self.has_done_all and not self._is_busy

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        self._post(self._stop)

    def join(self) -> None:
        """Wait for its end."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        def run() -> None:
            if self.error is None:
                command()
                self._is_busy = self.engine.has_unfinished_requests()
            self._num_done += 1

        self._num_posted += self._mailbox.post(run)

    # In the replica's thread.

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._mailbox.run(wait=not self._may_step())
                if self._may_step():
                    self._step(self.engine.step)
                    self._is_busy = self.engine.has_unfinished_requests()
        except BaseException as error:
            self.error = error
        finally:
            self._mailbox.close(EngineDeadError(f"replica {self.number} has ended"))
            self._reports.put(Report(replica=self.number, error=self.error, is_last=True))

    def _may_step(self) -> bool:
        if self._is_stopped or self._is_held or self._num_untaken >= MAX_UNTAKEN:
            return False
        return self.engine.has_unfinished_requests()

    def _step(self, move_on: Callable[[], StepOutput]) -> None:
        """Report what a step gained, or why it failed. Raises EngineDeadError if no more are likely to succeed."""
        try:
            output = move_on()
        except Exception as error:
            failed = self.engine.take_failed()
            self._reports.put(Report(replica=self.number, error=error, failed=failed))
            if self.engine.death is not None:
                raise EngineDeadError(f"{self.engine.death}: {error}") from error
        else:
            if output.result is not None or output.request_ids:
                self._num_untaken += 1
                output = replace(output, replica=self.number)
                self._reports.put(Report(replica=self.number, output=output))

    def _check(self) -> None:
        if self.error is not None:
            raise EngineDeadError(f"replica {self.number} has failed: {self.error!r}")

    def _take_one(self) -> None:
        self._num_untaken -= 1

    def _release(self) -> None:
        self._is_held = False

    def _stop(self) -> None:
        self._is_stopped = True
