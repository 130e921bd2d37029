"""Sleep and weight updates for a trainer in another process, under vLLM's names. With `--enable-rl`.

For administrators only: `limits.KeyCheck` ensures it. Pauses are in `admin`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from jaxpage.server.context import Server
from jaxpage.server.errors import ApiError


class UpdateWeights(BaseModel):
    """The checkpoint with the new weights."""

    model_path: str = Field(min_length=1)  # on the server's machine, or gs://...
    keep_cache: bool = False  # keep KV of the old weights in the prefix cache


def router(server: Server) -> APIRouter:
    """Sleep and weights."""
    routes = APIRouter()
    llm = server.llm

    @routes.post("/sleep")
    async def sleep(level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> Response:
        await llm.sleep(level, mode)
        return Response()

    @routes.post("/wake_up")
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        await llm.wake_up(tags)
        return Response()

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": await llm.is_sleeping()}

    @routes.post("/update_weights")
    async def update_weights(body: UpdateWeights) -> dict[str, Any]:
        try:
            version = await llm.update_weights(body.model_path, keep_cache=body.keep_cache)
        except OSError as error:  # a path that is too long, or that may not be read
            message = f"the checkpoint cannot be read: {error}"
            raise ApiError(400, message, param="model_path") from None
        return {"weight_version": version}

    @routes.get("/weight_version")
    async def weight_version() -> dict[str, int]:
        return {"weight_version": await llm.weight_version()}

    return routes
