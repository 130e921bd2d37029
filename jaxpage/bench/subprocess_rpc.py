"""An object in another Python process, whose methods are called through a pipe.

For what must not share a process: two users of one GPU's memory, torch beside jax, engines that need packages of their
own, a kernel that may crash. The other Python need not have jaxpage installed. The pipe carries one JSON object a line:
{"method": .., "arguments": [..]} down, {"answer": ..} or {"error": traceback} up.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]  # of this checkout
# At the end of the path, so that other packages never come from there.
CODE = """import sys
sys.path.append({root!r})
from jaxpage.bench.subprocess_rpc import serve
serve({target!r})
"""


class RemoteObject:
    """An object of the class `target` ("package.module:Class"), made in a new process without arguments.

    `environment`: variables that are set before anything is imported there. With `pause` the process is stopped while
    it is not asked anything: thread pools of some engines spin while they are idle.
    """

    def __init__(
        self,
        target: str,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        pause: bool = False,
    ) -> None:
        self.target, self._pause = target, pause
        variables = [f"{key}={value}" for key, value in (environment or {}).items()]
        code = CODE.format(root=str(ROOT), target=target)
        self._process = subprocess.Popen(
            # -P: the current folder must not come before the other Python's own packages
            ["env", *variables, python, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # so that `kill` also ends what the process has started
        )

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """What the method returns. Arguments and answer must be expressible in JSON.

        Raises RuntimeError with the traceback if the method raises, or with the status if the process dies;
        TimeoutError after `timeout` seconds. After the last two the process is gone.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        message = json.dumps({"method": method, "arguments": arguments}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # of a dead process, which gives no line
            self._process.stdin.write(message.encode())
            self._process.stdin.flush()
        # A reply is one line, so nothing of it can wait in a buffer already.
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.kill()
            raise TimeoutError(f"{self.target} was stopped after {timeout:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.target} died with status {self._process.wait()}")
        if self._pause:
            self._process.send_signal(signal.SIGSTOP)
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["answer"]

    def kill(self) -> None:
        """End the process, and those it has started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()  # `serve` ends
            self._process.send_signal(signal.SIGCONT)
            self._process.wait(timeout=10)
        self.kill()
        self._process.stdout.close()


def serve(target: str) -> None:
    """In the process: answer until the pipe closes. What libraries print goes to stderr."""
    # A stopped process cannot see its pipe close: it ends with the process that asks, however that ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    instance: Any = None
    for line in sys.stdin:
        try:
            if instance is None:
                module, name = target.split(":")
                instance = getattr(importlib.import_module(module), name)()
            message = json.loads(line)
            reply = {"answer": getattr(instance, message["method"])(*message["arguments"])}
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    os._exit(0)  # background threads of a library must not hold the process back
