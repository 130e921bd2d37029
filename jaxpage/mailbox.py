"""How one thread runs a function in another: it posts the function, and the other thread calls it when it is ready."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
Action = Callable[[], object]


class Mailbox:
    """Functions for one thread to call, in the order in which they were posted."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._closed_by: Exception | None = None
        # The garbage collector may call finalizers that post, also in a thread that holds the lock.
        self._lock = threading.RLock()

    def post(self, action: Action) -> bool:
        """Post an action, which must not raise, as nothing would report that. False if the mailbox is closed."""
        with self._lock:
            if self._closed_by is None:
                self._actions.put(action)
            return self._closed_by is None

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Post a function; the future gets what it returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        if not self.post(run):
            future.set_exception(self._closed_by)
        return future

    def run(self, *, wait: bool) -> None:
        """Call all functions posted so far; with `wait`, wait for at least one."""
        for _ in range(max(self._actions.qsize(), wait)):
            self._actions.get()()

    def close(self, error: Exception) -> None:
        """Call the remaining functions; later ones are not called and fail with the error.

        If some of them raise, the others are called all the same, as somebody may wait for their results; the first of
        these errors is raised in the end.
        """
        with self._lock:
            self._closed_by = error
        first: BaseException | None = None
        while self._actions.qsize():
            try:
                self._actions.get()()
            except BaseException as raised:
                first = first or raised
        if first is not None:
            raise first
