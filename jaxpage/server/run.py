"""A server from its start to its end: the socket, warm-up, signals, and how running requests end.

SIGTERM and SIGINT drain: /ready says 503, new requests are refused, running ones have `shutdown_timeout` seconds; those
that are left get an error. A second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from jaxpage.async_llm import AsyncLLM
from jaxpage.server.app import make_app
from jaxpage.server.context import Server
from jaxpage.server.options import ServerOptions

logger = logging.getLogger(__name__)

_LAST_WORDS = 5.0  # seconds for error events to reach their clients
_POLL = 0.05  # seconds


def bind(options: ServerOptions) -> socket.socket:
    """The socket, before the model is loaded: a port in use is told at once. Raises ValueError."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((options.host, options.port))
    except OSError as error:
        bound.close()
        raise ValueError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}"
        ) from None
    return bound


def run(llm: AsyncLLM, options: ServerOptions, bound: socket.socket) -> None:
    """Serve until a signal ends it."""
    asyncio.run(serve(llm, options, bound))


async def serve(llm: AsyncLLM, options: ServerOptions, bound: socket.socket) -> None:
    """The same within a running event loop."""
    server = Server.of(llm, options)
    app = make_app(server)
    app.router.lifespan_context = _lifespan(server)
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_level="warning",
        access_log=False,
        root_path=options.root_path,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        timeout_graceful_shutdown=int(_LAST_WORDS),
    )
    http = _Uvicorn(config, server)
    scheme = "https" if options.ssl_certfile else "http"
    host, port = bound.getsockname()[:2]
    logger.info("serving   %s on %s://%s:%d", server.model_name, scheme, host, port)
    await http.serve(sockets=[bound])


def _lifespan(
    server: Server,
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.ensure_future(_warm_up(server))
        yield
        warming.cancel()
        await asyncio.to_thread(server.llm.shutdown)

    return lifespan


async def _warm_up(server: Server) -> None:
    try:
        await server.llm.wait_until_warm()
    except Exception:
        logger.exception("the programs of this model do not compile")
        return
    server.is_warm = True
    logger.info("ready     every program is compiled")


class _Uvicorn(uvicorn.Server):
    """Drains before it exits."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self._server = server
        self._draining: asyncio.Task[None] | None = None
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of SIGTERM and SIGINT; runs in the event loop's thread."""
        if self._draining is not None:
            self._is_hurried = True
            return
        logger.info("%s: draining, a second one ends all requests", signal.Signals(sig).name)
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._drain())

    async def _drain(self) -> None:
        in_flight = self._server.in_flight
        in_flight.is_draining = True
        deadline = asyncio.get_running_loop().time() + self._server.options.shutdown_timeout
        while in_flight.num_requests and not self._is_hurried:
            if asyncio.get_running_loop().time() > deadline:
                logger.warning("%d requests have not ended in time", in_flight.num_requests)
                break
            await asyncio.sleep(_POLL)
        await asyncio.to_thread(self._server.llm.shutdown)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                while in_flight.num_requests:
                    await asyncio.sleep(_POLL)
        self.should_exit = True
