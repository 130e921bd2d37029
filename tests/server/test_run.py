"""Signals to a server."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

import uvicorn

from jaxpage.server import run
from jaxpage.server.run import HttpServer


def test_a_signal_drains_also_while_the_log_is_being_written(monkeypatch):
    """The stream refuses a write within a write: the handler must not make one."""
    begun, told = [], []
    is_in_handler = False

    def info(text: str, *values: object) -> None:
        if is_in_handler:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")
        told.append(text % values)

    monkeypatch.setattr(run.logger, "info", info)
    monkeypatch.setattr(HttpServer, "_begin_to_drain", lambda self: begun.append(self))

    async def main() -> HttpServer:
        nonlocal is_in_handler
        nobody: Any = None
        server = HttpServer(uvicorn.Config(nobody, log_level=logging.WARNING), nobody)
        server._loop = asyncio.get_running_loop()
        is_in_handler = True
        server.handle_exit(signal.SIGTERM, None)
        is_in_handler = False
        await asyncio.sleep(0)
        return server

    assert begun == [asyncio.run(main())]
    assert told == ["SIGTERM: running requests may end, a second one ends them"]
