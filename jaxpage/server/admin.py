"""Routes for administrators only: `limits.KeyCheck` ensures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from jaxpage.server.context import Server
from jaxpage.server.errors import ApiError


class AbortRequest(BaseModel):
    """Ids of answers, with or without their prefix; none: all requests."""

    request_ids: list[str] | None = None


class LoadAdapter(BaseModel):
    """An adapter and its name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replace an adapter with this name


class UnloadAdapter(BaseModel):
    """The adapter to stop serving."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's; the name is sufficient


def router(server: Server) -> APIRouter:
    """Pausing, aborting, the prefix cache, adapters and the profiler."""
    routes = APIRouter()
    llm = server.llm

    @routes.post("/pause")
    async def pause(
        mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
    ) -> dict[str, Any]:
        await llm.pause_generation(mode=mode, clear_cache=clear_cache)
        return {"status": "paused"}

    @routes.post("/resume")
    async def resume() -> dict[str, Any]:
        await llm.resume_generation()
        return {"status": "resumed"}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": await llm.is_paused()}

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> dict[str, bool]:
        if not await llm.reset_prefix_cache(reset_running_requests):
            raise ApiError(
                409,
                "requests hold blocks of the cache; ask again later, or with reset_running_requests=true",
            )
        return {"success": True}

    @routes.post("/abort_requests")
    async def abort_requests(body: AbortRequest | None = None) -> dict[str, int]:
        names = None if body is None else body.request_ids
        ids = _engine_ids(server.in_flight.engine_ids, names)
        await llm.abort(ids)
        return {"aborted": len(ids)}

    @routes.post("/start_profile")
    async def start_profile() -> Response:
        folder = server.options.profiler_dir
        if folder is None:
            raise ApiError(400, "start the server with --profiler-dir FOLDER to profile it")
        try:
            await llm.start_profile(folder)
        except RuntimeError as error:
            raise ApiError(409, f"the profiler does not start: {error}") from None
        return JSONResponse({"profiler_dir": str(folder)})

    @routes.post("/stop_profile")
    async def stop_profile() -> Response:
        try:
            await llm.stop_profile()
        except RuntimeError as error:
            raise ApiError(409, f"the profiler does not stop: {error}") from None
        return Response()

    _add_adapters(routes, server)
    return routes


def _add_adapters(routes: APIRouter, server: Server) -> None:
    @routes.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapter) -> Response:
        await server.adapters.load(body.lora_name, body.lora_path, inplace=body.load_inplace)
        return Response()

    @routes.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapter) -> Response:
        await server.adapters.unload(body.lora_name)
        return Response()


def _engine_ids(known: Mapping[str, Sequence[str]], names: Sequence[str] | None) -> list[str]:
    """Of the calls with these names, with or without an answer's prefix; None: of all."""
    if names is None:
        return [i for ids in known.values() for i in ids]
    # A client may choose an id that begins like an answer's: a name is looked up as it is first.
    found = (known.get(name) or known.get(_without_prefix(name), ()) for name in names)
    return [i for ids in found for i in ids]


def _without_prefix(name: str) -> str:
    for prefix in ("chatcmpl-", "cmpl-", "resp_", "msg_"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
