"""One engine in its own thread, which executes commands between steps, runs steps, and reports results.

Knows the methods of an engine. Must not know the other replicas, or what happens to its reports.
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

MAX_UNTAKEN = 2  # outputs that may be waiting to be taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A message from a replica. Reports arrive in the order of events."""

    replica: int
    output: StepOutput | None = None
    forgotten: str | None = None  # id of a request that no later report mentions
    error: BaseException | None = None  # raised by a step, or the cause of the thread's end
    failed: list[str] = field(default_factory=list)  # ids of the requests which that step has ended
    is_last: bool = False  # the thread has ended


class Replica:
    """Runs an engine in a thread. Only one other thread, the owner, calls the methods of the first group."""

    def __init__(self, number: int, engine: Engine, reports: SimpleQueue[Report]):
        self.number, self.engine = number, engine
        self.error: BaseException | None = None  # that ended the thread
        self._reports = reports
        self._mailbox = Mailbox()
        # Commands posted and done; each counter is written by one thread only.
        self._num_posted = self._num_done = 0
        self._is_busy = False  # as of the last command or step
        self._is_held = False
        self._is_stopped = False
        self._num_untaken = 0
        name = f"jaxpage-replica-{number}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # For the owner's thread. These have no effect once the replica's thread has ended.

    def add(self, request: Request) -> None:
        """Queue a request that the engine can run."""
        self._post(lambda: self.engine.add(request))

    def forget(self, request_id: str) -> None:
        """Abort a request unless it has ended, and report that it is forgotten."""

        def forget() -> None:
            self.engine.abort(request_id)
            self._reports.put(Report(replica=self.number, forgotten=request_id))

        self._post(forget)

    def end_by_text(self, end: TextEnd) -> None:
        """See `Engine.end_by_text`."""
        self._post(lambda: self.engine.end_by_text(end))

    def take_one(self) -> None:
        """Tell the replica that an output was taken."""
        self._post(self._take_one)

    def hold(self) -> None:
        """Collect the step in flight, and launch no other until `release`."""

        def hold() -> None:
            self._is_held = True
            if self.engine.has_step_in_flight:
                self._step(self.engine.collect)

        self._post(hold)

    def release(self) -> None:
        """Launch steps again."""
        self._post(self._release)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function between two steps. The future raises EngineDeadError if the thread has failed."""

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
        """Whether no command is pending."""
        return self._num_done == self._num_posted

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do and has reported everything."""
        # In this order: without pending commands, an idle replica stays idle.
        return self.has_done_all and not self._is_busy

    def stop(self) -> None:
        """End the thread after its current step."""
        self._post(self._stop)

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        def run() -> None:
            if self.error is None:
                command()
                self._is_busy = self.engine.has_unfinished_requests()
            self._num_done += 1

        self._num_posted += self._mailbox.post(run)

    # For the replica's thread.

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self.engine.sleep_until_due()
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
        """Run a step, and report its output or error. Raises EngineDeadError if the engine is dead."""
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
