"""How a server ends when its engine stops, hangs, or fails to stop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from jaxpage.server import run
from tests.server.hanging import HangingLLM, make_server


class LLM(HangingLLM):
    """An engine with a shutdown of the test's."""

    def __init__(self, shutdown: Callable[[], object]):
        self.num_shutdowns = 0
        self._end = shutdown

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        self._end()

    async def wait_until_warm(self) -> None:
        self.http.drain()
        await asyncio.Event().wait()  # the server cancels this


def drain(shutdown: Callable[[], object]) -> LLM:
    """An engine whose server was started and drained."""
    llm = LLM(shutdown)
    llm.http = make_server(llm)
    with run.bind(llm.http.server.options) as bound:
        asyncio.run(asyncio.wait_for(llm.http.serve([bound]), 20))
    return llm


def test_a_server_waits_for_an_engine_that_stops(caplog):
    ends: list[float] = []
    llm = LLM(lambda: (time.sleep(0.2), ends.append(time.monotonic())))
    server = make_server(llm).server
    asyncio.run(run.stop_engine(server))
    assert ends and ends[0] <= time.monotonic()
    assert llm.num_shutdowns == 1 and not server.engine_hangs
    assert "has not stopped" not in caplog.text


def test_a_server_drains_without_an_engine_that_does_not_stop(monkeypatch, caplog):
    monkeypatch.setattr(run, "_LONGEST_STOP", 0.1)
    llm = drain(lambda: Event().wait())
    assert llm.num_shutdowns == 1 and llm.http.server.engine_hangs
    assert caplog.text.count("the engine has not stopped within 0.1 s") == 1


@pytest.mark.slow
def test_the_process_ends_though_engine_and_compiler_hang():
    """Both the loop's runner and Python's exit would wait for their threads."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.server.hanging"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "the engine has not stopped within 0.2 s" in ended.stderr


def test_what_the_engine_raises_at_its_end_is_logged_and_ends_the_server(caplog):
    def fail() -> None:
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        drain(fail)
    assert "the engine's shutdown failed" in caplog.text and "Traceback" in caplog.text
