"""Lets one caller at a time into an engine, and defers Ctrl-C."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_WAKES = 100  # in ten seconds


class OneCaller:
    """A re-entrant context that only one thread at a time may enter, in the process that created it.

    Two threads would launch with the same donated buffers, and a forked child lacks the threads that run the device:
    both would fail far from their cause, or hang.
    """

    def __init__(self):
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._name = ""  # of the thread inside

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this LLM was made in process {self._pid}, and this is its forked child {os.getpid()}, where no "
                'device runs; make an LLM in the child, with the start method "spawn" of multiprocessing'
            )

    def __enter__(self) -> None:
        self.check_process()
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} calls this LLM while {self._name!r} is in a call of "
                "it; let one thread call an LLM, or put a lock around the calls"
            )
        self._name = threading.current_thread().name

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the end of the block, so that it cannot interrupt a step."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # signals arrive in the main thread only
        return
    came: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise Ctrl-C again where Python drops it: in finalizers, and in callbacks of its garbage collector.

    jax has such a callback, which runs often while an engine starts.
    """
    before, ended = sys.unraisablehook, threading.Event()

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
        else:  # a little later, from another thread: here it would be dropped again
            _thread.start_new_thread(interrupt_soon, ())

    def interrupt_soon() -> None:
        time.sleep(0.1)
        main = threading.main_thread().ident
        if main is not None and hasattr(signal, "pthread_kill"):
            # A real signal, which wakes the main thread if it waits.
            signal.pthread_kill(main, signal.SIGINT)
            # If it was about to wait, Python notes the signal, and waits. Others, which do nothing else, wake it then.
            for _ in range(_WAKES):
                if ended.wait(0.1):
                    break
                signal.pthread_kill(main, signal.SIGURG)
        else:  # Windows
            _thread.interrupt_main()

    sys.unraisablehook = hook
    try:
        with _woken_by_sigurg():
            yield
    finally:
        ended.set()
        sys.unraisablehook = before


@contextlib.contextmanager
def _woken_by_sigurg() -> Iterator[None]:
    """Let SIGURG interrupt what the main thread waits for, which Python then goes on with, after other signals."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "SIGURG"):
        yield
        return
    before = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGURG, signal.SIG_DFL if before is None else before)
