"""A separate process for each target, because compilers must be configured before jax is imported.

A request goes to the process as JSON. It answers with lines of JSON: any number of reports, then one outcome.
`run` is the parent's side, `serve` the child's. Must not know what is compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from jaxpage.aot.targets import Target
from jaxpage.aot.topology import compiler_advice, environment

Report = Callable[[dict[str, Any]], None]


def run(
    module: str,
    request: dict[str, Any],
    target: Target,
    *,
    on_report: Report = lambda _: None,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """The result of `module` for the request. Raises ValueError: the module's own, or one for a compiler that failed.

    `variables`: additional environment variables.
    `timeout`: seconds after which the process is killed, which is an error too.
    """
    more = [f"{name}={value}" for name, value in (variables or {}).items()]
    command = ["env", *environment(target), *more, sys.executable, "-m", module]
    outcome: dict[str, Any] = {}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        timed_out = threading.Event()

        def give_up() -> None:
            timed_out.set()
            process.kill()

        timer = threading.Timer(timeout or 0, give_up)
        if timeout is not None:
            timer.start()
        try:
            json.dump(request, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                message = json.loads(line) if line.startswith("{") else {}
                if "report" in message:
                    on_report(message["report"])
                elif message:
                    outcome = message
            code = process.wait()
        except BaseException:  # including Ctrl-C
            process.kill()
            raise
        finally:
            timer.cancel()
        log.seek(0)
        words = log.read()
    if "result" in outcome:
        return outcome["result"]
    if "refused" in outcome:
        raise ValueError(outcome["refused"])
    reason = outcome.get("failed") or f"the process ended with status {code}: {words[-1000:]}"
    if timed_out.is_set():
        reason = f"no answer within {timeout:g} s"
    advice = compiler_advice(target.chip.platform)
    raise ValueError(f"compiling for {target.name} failed: {reason}{advice and f'; {advice}'}")


def serve(work: Callable[[dict[str, Any], Report], Any]) -> None:
    """Answer the request on standard input with `work(request, report)`. Its ValueErrors are the user's errors."""

    # Reports come from several threads, and `print` writes a line in two parts.
    lock = threading.Lock()

    def send(**message: Any) -> None:
        with lock:
            print(json.dumps(message), flush=True)

    try:
        result = work(json.load(sys.stdin), lambda report: send(report=report))
    except ValueError as error:
        send(refused=str(error))
    except Exception as error:
        traceback.print_exc()
        send(failed=_summary(error))
    else:
        send(result=result)


def _summary(error: Exception) -> str:
    """The error's type and the start of its message, without the compiler's own stack."""
    text = " ".join(str(error).partition("*** Begin stack trace")[0].split())
    return f"{type(error).__name__}: {text[:600]}"
