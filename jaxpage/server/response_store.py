"""Stores responses on request, in memory: they are lost when the server ends."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from jaxpage.server.errors import ApiError
from jaxpage.server.protocol.response_items import Item, read_items


@dataclass(kw_only=True)
class StoredResponse:
    """A response and its input."""

    items: tuple[Item, ...]  # of the conversation before it
    response: dict[str, Any]  # its latest state, since its start
    request_ids: tuple[str, ...]  # the engine's

    @property
    def is_running(self) -> bool:
        return self.response["status"] == "in_progress"


class ResponseStore:
    """At most `limit` responses; the least recently used is evicted first."""

    def __init__(self, limit: int):
        self._limit = limit
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, stored: StoredResponse) -> None:
        """Raises ApiError 400 if nothing is stored here, or the id exists."""
        if self._limit == 0:
            raise ApiError(
                400, "store=true is not served: --max-stored-responses is 0", param="store"
            )
        response_id = stored.response["id"]
        if response_id in self._stored:
            raise ApiError(
                400, f"there is a response {response_id!r}; choose another id", param="request_id"
            )
        self._stored[response_id] = stored
        while len(self._stored) > self._limit:
            self._stored.popitem(last=False)

    def find(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises ApiError 404 that names `param`."""
        if response_id not in self._stored:
            raise ApiError(
                404,
                f"there is no response {response_id!r}; of those with store=true the last {self._limit} are kept",
                param=param,
            )
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def remove(self, response_id: str) -> None:
        """Raises ApiError 404."""
        self.find(response_id)
        del self._stored[response_id]

    def conversation(self, response_id: str | None) -> tuple[Item, ...]:
        """The conversation up to and including a response; empty for None. Raises ApiError."""
        if response_id is None:
            return ()
        stored = self.find(response_id, "previous_response_id")
        if stored.is_running:
            raise ApiError(
                400,
                f"response {response_id!r} has not ended; wait for it",
                param="previous_response_id",
            )
        return (*stored.items, *read_items(stored.response["output"]))
