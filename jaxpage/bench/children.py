"""An object in a Python process of its own, whose methods are called through a pipe.

For what must not share a process: two users of one GPU's memory, torch beside jax, a kernel that may take its process
with it. Both ends of the pipe are here: `Child`, and `serve` in the process. Only the standard library at the top.

The pipe carries one JSON object a line: {"method": .., "arguments": [..]} down, {"answer": ..} or {"error": traceback}
up.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # where `import jaxpage` finds this checkout
CHILD = "import sys; sys.path.append({root!r}); from jaxpage.bench.children import serve; serve({target!r})"


class Child:
    """An object of the class `target` ("package.module:Class"), made in a new process without arguments.

    `environment`: variables that stand before anything is imported there, over those of this process.
    """

    def __init__(self, target: str, *, environment: Mapping[str, str] | None = None) -> None:
        self.target = target
        variables = [f"{key}={value}" for key, value in (environment or {}).items()]
        code = CHILD.format(root=str(ROOT), target=target)
        self._process = subprocess.Popen(
            ["env", *variables, sys.executable, "-P", "-u", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # so that `kill` also ends what the process has started
        )

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """What the method returns. Arguments and answer are what JSON can say.

        Raises RuntimeError with the traceback if the method raises, or with the status if the process dies;
        TimeoutError after `timeout` seconds. After the last two the child is of no more use.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        message = json.dumps({"method": method, "arguments": arguments}) + "\n"
        try:
            self._process.stdin.write(message.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"{self.target} died with status {self._process.wait()}") from None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            # A reply is one line, so nothing of it can wait in a buffer already.
            if not selector.select(timeout):
                self.kill()
                raise TimeoutError(f"{self.target} was stopped after {timeout:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.target} died with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["answer"]

    def kill(self) -> None:
        """End the process, and those it has started, at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()  # the child's loop ends
            self._process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self.kill()
        self._process.wait()
        self._process.stdout.close()


def serve(target: str) -> None:
    """The child: answer until the pipe closes. What libraries print goes to stderr."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive who asks
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child: Any = None
    for line in sys.stdin:
        try:
            if child is None:
                module, name = target.split(":")
                child = getattr(importlib.import_module(module), name)()
            message = json.loads(line)
            reply = {"answer": getattr(child, message["method"])(*message["arguments"])}
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    os._exit(0)  # background threads of a library must not hold the process back
