"""Health, metrics and other information about a server."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from jaxpage import __version__
from jaxpage.server.context import Server


def router(server: Server) -> APIRouter:
    """Health, versions, load and models."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        """Whether the engine can answer: 200, or 503."""
        await server.llm.check_health()
        return Response()

    @routes.get("/live")
    async def live() -> Response:
        """Whether the process works: 200, also during start-up and shutdown."""
        return Response()

    @routes.get("/ready")
    async def ready() -> Response:
        """Whether to send requests here: 503 during compilation and shutdown."""
        return Response(status_code=200 if server.is_ready else 503)

    # Two decorators: one for both methods would give them the same operation id in the OpenAPI schema.
    @routes.get("/ping")
    @routes.post("/ping")
    async def ping() -> Response:
        await server.llm.check_health()
        return Response()

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/load")
    async def load() -> dict[str, int]:
        """Running requests."""
        return {"server_load": server.in_flight.num_requests}

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        text = await asyncio.to_thread(server.metrics.render)
        return Response(text, headers={"Content-Type": server.metrics.content_type})

    @routes.get("/v1/models")
    async def models() -> Response:
        names = (*server.model_names, *server.adapters.names)
        data = [_model(server, name) for name in names]
        return JSONResponse({"object": "list", "data": data})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        server.check_model(name)
        return JSONResponse(_model(server, name))

    return routes


def _model(server: Server, name: str) -> dict[str, Any]:
    adapter = server.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "jaxpage",
        "root": server.llm.config.model if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else server.model_name,
        "max_model_len": server.llm.config.max_model_len,
    }
