"""What Ray runs in separate processes: an `Engine` per replica, and a `Front` that forwards requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import ActorDiedError, RayError  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import RayServeException  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from starlette.types import ASGIApp, Message

from jaxpage.async_llm import AsyncLLM
from jaxpage.config import EngineConfig
from jaxpage.ray_serve.call import Call, ReplicaFailedError, WholeAnswer, messages, whole_answer
from jaxpage.ray_serve.front import front_app
from jaxpage.server.options import ServerOptions
from jaxpage.server.run import make_service


class Engine:
    """An `AsyncLLM` and its server, without a socket. Ready once all programs are compiled."""

    async def __init__(self, config: EngineConfig, options: ServerOptions):
        logging.basicConfig(format="%(message)s")  # Ray collects stderr
        logging.getLogger("jaxpage").setLevel(logging.INFO)
        self._llm = await asyncio.to_thread(AsyncLLM.from_engine_args, config)
        self._app, server = make_service(self._llm, options)
        await server.adapters.load_first()
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()
        await self._llm.wait_until_warm()
        self._id: str = serve.get_replica_context().replica_id.unique_id

    async def answer(self, call: Call) -> AsyncGenerator[tuple[str, list[Message]], None]:
        """See `front.Replicas`."""
        yield self._id, []
        async with contextlib.aclosing(messages(self._app, call)) as parts:
            async for part in parts:
                yield self._id, part

    async def whole_answer(self, call: Call) -> WholeAnswer:
        """The complete answer."""
        return await whole_answer(self._app, call, self._id)

    async def check_health(self) -> None:
        """Ray replaces a replica if this raises."""
        await self._llm.check_health()

    async def __del__(self) -> None:
        """Ray calls it once a stopping replica has answered its requests, or has used up its time."""
        await self._life.__aexit__(None, None, None)


class Front:
    """The application behind Ray Serve's proxies."""

    def __init__(self, engine: DeploymentHandle, max_body_size: int):
        self._app = front_app(Engines(engine), max_body_size)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray serves it over HTTP."""
        return self._app


class Engines:
    """The replicas of `Engine`, see `front.Replicas`."""

    def __init__(self, engine: DeploymentHandle):
        self._engine = engine
        self._answer = engine.options(method_name="answer", stream=True)

    async def answer(self, call: Call) -> AsyncGenerator[tuple[str, list[Message]], None]:
        response: Any = self._answer.remote(call)
        has_ended = False
        try:
            async for replica, part in response:
                yield replica, [_without_request_id(message) for message in part]
            has_ended = True
        except (RayError, RayServeException) as error:
            has_ended = True
            raise ReplicaFailedError(str(error)) from error
        finally:
            if not has_ended:
                response.cancel()

    async def answer_everywhere(self, call: Call) -> Sequence[WholeAnswer]:
        try:
            found: Any = await self._engine.broadcast("whole_answer", call).results_async(
                return_exceptions=True
            )
        except (RayError, RayServeException) as error:
            raise ReplicaFailedError(str(error)) from error
        # A replica that has just died does not matter; one that is alive and fails does.
        there = [answer for answer in found if not isinstance(answer, ActorDiedError)]
        for answer in there:
            if isinstance(answer, Exception):
                raise ReplicaFailedError(str(answer)) from answer
        return there


def _without_request_id(message: Message) -> Message:
    """Ray's proxy sends this header too: the client's id, or one that it generated and passed to us."""
    if message["type"] != "http.response.start":
        return message
    headers = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
    return {**message, "headers": headers}
