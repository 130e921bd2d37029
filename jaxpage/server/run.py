"""A server from its start to its end: the socket, warm-up, signals, and how running requests end.

SIGTERM and SIGINT drain: /ready says 503, new requests are refused, running ones have `shutdown_timeout` seconds; those
that are left get an error. A second signal ends them at once. If the engine hangs, the server ends without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from types import FrameType

import uvicorn
from fastapi import FastAPI

from jaxpage.async_llm import AsyncLLM
from jaxpage.pooling.async_pooler import AsyncPooler
from jaxpage.server.app import make_app
from jaxpage.server.context import Server
from jaxpage.server.options import ServerOptions
from jaxpage.server.pooling import make_pooling_app
from jaxpage.server.throughput_log import log_throughput
from jaxpage.server.tracing import Traces

logger = logging.getLogger(__name__)

_LAST_WORDS = 5.0  # seconds for error events to reach their clients
_POLL = 0.05  # seconds
_LONGEST_STOP = 30.0  # seconds for the engine to stop
_YOUNG_OBJECTS = 20_000  # more than there were, before a collection


def bind(options: ServerOptions) -> socket.socket:
    """The socket, before the model is loaded: a port in use, or a file that is not there, is told at once.

    Raises ValueError.
    """
    options.check_files()
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


def run(llm: AsyncLLM | AsyncPooler, options: ServerOptions, bound: socket.socket) -> None:
    """Serve until a signal ends it. If the engine does not stop then, the process ends here, with 1."""
    http = make_http(llm, options)
    with asyncio.Runner(loop_factory=http.config.get_loop_factory()) as runner:
        runner.run(http.serve(sockets=[bound]))
        if http.server.engine_hangs:
            # What comes next would wait for what hangs: the runner joins the threads of `asyncio.to_thread`, and at
            # Python's exit jax releases devices, which a step or a compiler still uses. The log is on stderr already.
            os._exit(1)


def make_http(llm: AsyncLLM | AsyncPooler, options: ServerOptions) -> HttpServer:
    """Everything but the socket."""
    app, server = make_service(llm, options)
    # uvicorn's would be added to paths that have it already.
    app.root_path = options.root_path
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(_LAST_WORDS),
    )
    config.load()
    config.ssl = options.ssl_context  # `load` would read the files again
    return HttpServer(config, server)


def make_service(llm: AsyncLLM | AsyncPooler, options: ServerOptions) -> tuple[FastAPI, Server]:
    """The application, and what it serves. Its lifespan warms the engine up, and at last shuts it down."""
    if isinstance(llm, AsyncPooler):
        app, server = make_pooling_app(llm, options)
        app.router.lifespan_context = _lifespan(server, None)
        return app, server
    server = Server.of(llm, options)
    traces = None
    if options.otlp_traces_endpoint is not None:
        traces = Traces.to(options.otlp_traces_endpoint, server.model_name)
        llm.observe(traces)
    app = make_app(server)
    app.router.lifespan_context = _lifespan(server, traces)
    return app, server


def _lifespan(
    server: Server,
    traces: Traces | None,
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(_warm_up(server))]
        if not server.options.disable_log_stats:
            tasks.append(asyncio.ensure_future(log_throughput(server.llm)))
        yield
        for task in tasks:
            task.cancel()
        await stop_engine(server)
        if traces is not None:
            await asyncio.to_thread(traces.shutdown)

    return lifespan


async def stop_engine(server: Server) -> None:
    """Stop the engine, and wait for that, but not for one that hangs: `engine_hangs` is then set.

    Raises what the engine's `shutdown` raises.
    """
    if server.engine_hangs:
        return
    ended: Future[None] = Future()
    # A daemon, as the process waits at its end for the threads of `asyncio.to_thread`.
    threading.Thread(
        target=_shut_down, args=(server, ended), name="engine-shutdown", daemon=True
    ).start()
    waiting = asyncio.wrap_future(ended)
    await asyncio.wait([waiting], timeout=_LONGEST_STOP)
    if waiting.done():
        return waiting.result()
    server.engine_hangs = True
    logger.error(
        "the engine has not stopped within %g s; the process ends without it, with exit code 1; a step, a compilation "
        "or queued work may still run",
        _LONGEST_STOP,
    )


def _shut_down(server: Server, ended: Future[None]) -> None:
    try:
        server.llm.shutdown()
    except BaseException as error:
        logger.exception("the engine's shutdown failed")
        ended.set_exception(error)
    else:
        ended.set_result(None)


async def _warm_up(server: Server) -> None:
    try:
        await server.llm.wait_until_warm()
    except Exception:
        logger.exception("the programs of this model do not compile")
        return
    # What is there now stays. Collections that look through all of it hold every thread for a third of a second, and
    # those of what is young take a tenth of the server's time, as hundreds of requests keep all of it alive.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
    server.is_warm = True
    logger.info("ready     every program is compiled")


class HttpServer(uvicorn.Server):
    """Drains before it exits."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self.server = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._is_hurried = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until a signal, or `drain`. Raises ValueError for adapters that cannot be had, and as `stop_engine`."""
        self._loop = asyncio.get_running_loop()
        await self.server.adapters.load_first()
        for bound in sockets or ():
            scheme = "https" if self.config.ssl else "http"
            host, port = bound.getsockname()[:2]
            logger.info("serving   %s on %s://%s:%d", self.server.model_name, scheme, host, port)
        await super().serve(sockets)
        # By then it has ended, unless something else ended the server.
        if self._draining is not None and self._draining.done():
            self._draining.result()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of SIGTERM and SIGINT. The loop logs it: the signal may have interrupted a write of the log."""
        self.drain()
        if self._loop is not None:
            text = "%s: running requests may end, a second one ends them"
            self._loop.call_soon_threadsafe(logger.info, text, signal.Signals(sig).name)

    def drain(self) -> None:
        """Take no more requests, and end when the running ones have ended, or when it is called again."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._is_hurried = True

    async def _drain(self) -> None:
        in_flight = self.server.in_flight
        in_flight.is_draining = True
        deadline = asyncio.get_running_loop().time() + self.server.options.shutdown_timeout
        while in_flight.num_requests and not self._is_hurried:
            if asyncio.get_running_loop().time() > deadline:
                logger.warning("%d requests have not ended in time", in_flight.num_requests)
                break
            await asyncio.sleep(_POLL)
        try:
            await stop_engine(self.server)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    while in_flight.num_requests:
                        await asyncio.sleep(_POLL)
            self.should_exit = True
