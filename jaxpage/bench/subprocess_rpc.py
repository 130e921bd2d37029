"""An object in another Python process, whose methods are called through a pipe.

For things that must not share a process: two users of one GPU's memory, torch and jax, engines that need their own
packages, a kernel that may crash. The other Python need not have jaxpage installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]  # of this checkout
# At the end of the path, so that no other package is imported from there.
CODE = """import sys
sys.path.append({root!r})
from jaxpage.bench.subprocess_rpc import serve
serve({target!r}, {pipe})
"""


class RemoteObject:
    """An instance of the class `target` ("package.module:Class"), created without arguments in a new process.

    `environment`: variables that are set before anything is imported there; `threads`: how many processors it may use,
    which is also the size of XLA's and OpenMP's thread pools. With `pause` the process is stopped between calls,
    because idle thread pools of some engines spin. Whatever libraries print there goes to stderr.
    """

    def __init__(
        self,
        target: str,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        threads: int | None = None,
        pause: bool = False,
    ) -> None:
        self.target, self._pause = target, pause
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            code = CODE.format(root=str(ROOT), target=target, pipe=theirs.fileno())
            variables = [f"{name}={value}" for name, value in (environment or {}).items()]
            self._process = subprocess.Popen(
                # -P: the current folder must not shadow the other Python's packages
                ["env", *variables, python, "-P", "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,  # so that `kill` also reaches child processes
            )
        if threads is not None:
            os.sched_setaffinity(self._process.pid, sorted(os.sched_getaffinity(0))[:threads])

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Call a method; returns its result.

        Raises RuntimeError with message and traceback if the method raises, or with the status if the process dies;
        TimeoutError after `timeout` seconds. In the latter two cases the process has ended.
        """
        self._process.send_signal(signal.SIGCONT)
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(timeout):
                self.kill()
                raise TimeoutError(f"{self.target} was stopped after {timeout:.0f} s")
            succeeded, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            status = self._process.wait()
            raise RuntimeError(f"{self.target} died with status {status}") from None
        if self._pause:
            self._process.send_signal(signal.SIGSTOP)
        if not succeeded:
            raise RuntimeError(answer)
        return answer

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # `serve` ends
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self.kill()


def serve(target: str, pipe: int) -> None:
    """The process's side: answer calls until the pipe closes."""
    # A stopped process cannot notice that its pipe closes, so it is killed when its parent ends, however that ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    connection, instance = Connection(pipe), None
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            try:
                if instance is None:
                    module, name = target.split(":")
                    instance = getattr(importlib.import_module(module), name)()
                reply = True, getattr(instance, method)(*arguments)
            except Exception as error:
                reply = False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            connection.send(reply)
    os._exit(0)  # a library's background threads must not keep the process alive
