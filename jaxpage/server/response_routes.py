"""Stored responses: retrieve, delete, cancel, and list their inputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from jaxpage.server.context import Server
from jaxpage.server.errors import ApiError


def router(server: Server) -> APIRouter:
    """All of `/v1/responses/{id}`."""
    routes = APIRouter(prefix="/v1/responses/{response_id}")

    @routes.get("")
    async def retrieve(response_id: str, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise ApiError(
                400, "stream=true is not served here; stored responses come whole", param="stream"
            )
        return server.responses.find(response_id).response

    @routes.delete("")
    async def delete(response_id: str) -> dict[str, Any]:
        server.responses.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/cancel")
    async def cancel(response_id: str) -> dict[str, Any]:
        """Clients that wait for it get the partial answer."""
        stored = server.responses.find(response_id)
        if not stored.is_running:
            raise ApiError(400, f"response {response_id!r} has ended, there is nothing to cancel")
        await server.llm.abort(stored.request_ids)
        return stored.response | {"status": "cancelled"}

    @routes.get("/input_items")
    async def input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """A page of the input conversation."""
        items = [item.body() for item in server.responses.find(response_id).items]
        return _page(items if order == "asc" else items[::-1], limit, after)

    return routes


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """OpenAI's list. Raises ApiError 400 for an unknown `after`."""
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, f"there is no item {after!r}", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }
