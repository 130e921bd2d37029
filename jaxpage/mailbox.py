"""How one thread asks another to do something: it posts a function, which the other one calls when it is ready."""

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
        self._lock = threading.Lock()

    def post(self, action: Action) -> bool:
        """Have it called. It must not raise: nobody would learn of it. False: the mailbox is closed."""
        with self._lock:
            if self._closed_by is None:
                self._actions.put(action)
            return self._closed_by is None

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Have it called, and get what it returns or raises."""
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
        """Call what has been posted so far; with `wait`, at least one."""
        for _ in range(max(self._actions.qsize(), wait)):
            self._actions.get()()

    def close(self, error: Exception) -> None:
        """Call what is left, and nothing that comes later: that fails with the error."""
        with self._lock:
            self._closed_by = error
        self.run(wait=False)
