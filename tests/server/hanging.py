"""A server whose engine neither compiles nor stops. `python -m tests.server.hanging` starts it, and tells it to end."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI

from jaxpage.server import run
from jaxpage.server.options import ServerOptions


def make_server(llm: Any) -> run.HttpServer:
    """A server of this engine, with what a server needs at its start and its end."""

    async def load_first() -> None: ...

    server: Any = SimpleNamespace(
        llm=llm,
        options=ServerOptions(port=0, shutdown_timeout=0.0, disable_log_stats=True),
        in_flight=SimpleNamespace(num_requests=0, is_draining=False),
        adapters=SimpleNamespace(load_first=load_first),
        model_name="none",
        engine_hangs=False,
    )
    app = FastAPI(lifespan=run._lifespan(server, None))
    config = uvicorn.Config(app, lifespan="on", log_level="warning")
    config.load()
    return run.HttpServer(config, server)


class HangingLLM:
    """Drains its server when it is asked to warm up."""

    http: run.HttpServer

    def shutdown(self) -> None:
        threading.Event().wait()

    async def wait_until_warm(self) -> None:
        self.http.drain()
        await asyncio.to_thread(threading.Event().wait)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    run._LONGEST_STOP = 0.2
    llm: Any = HangingLLM()
    llm.http = make_server(llm)
    run.make_http = lambda *_: llm.http
    run.run(llm, llm.http.server.options, run.bind(llm.http.server.options))
