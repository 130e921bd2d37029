"""Stores responses on request, in memory: they are lost when the server ends."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from jaxpage.server.errors import ApiError
from jaxpage.server.protocol.response_items import Item, read_items

MAX_BYTES = 256 * 2**20  # of all responses together


@dataclass(kw_only=True)
class StoredResponse:
    """A response and its input."""

    items: tuple[Item, ...]  # of the conversation before it
    response: dict[str, Any]  # its latest state, since its start
    request_ids: tuple[str, ...]  # the engine's
    num_bytes: int = field(default=0, init=False)  # as last counted by the store

    @property
    def is_running(self) -> bool:
        return self.response["status"] == "in_progress"


class ResponseStore:
    """At most `limit` responses of `max_bytes` together, or one that is larger; the least recently used is evicted
    first.

    The input of a continued response is counted again with each of its continuations.
    """

    def __init__(self, limit: int, max_bytes: int = MAX_BYTES):
        self._limit, self._max_bytes = limit, max_bytes
        self._num_bytes = 0
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
        stored.num_bytes = _size(stored.items) + _size(stored.response)
        self._num_bytes += stored.num_bytes
        self._evict()

    def update(self, stored: StoredResponse, response: dict[str, Any]) -> None:
        """A response has ended. It may have been evicted or removed."""
        before, stored.response = stored.response, response
        if self._stored.get(response["id"]) is stored:
            grown = _size(response) - _size(before)
            stored.num_bytes += grown
            self._num_bytes += grown
            self._evict()

    def _evict(self) -> None:
        while len(self._stored) > self._limit or (
            self._num_bytes > self._max_bytes and len(self._stored) > 1
        ):
            _, evicted = self._stored.popitem(last=False)
            self._num_bytes -= evicted.num_bytes

    def find(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises ApiError 404 that names `param`."""
        if response_id not in self._stored:
            raise ApiError(
                404,
                f"there is no response {response_id!r}; of those with store=true the last {self._limit} are kept, if "
                f"they have no more than {self._max_bytes / 2**20:g} MiB",
                param=param,
            )
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def remove(self, response_id: str) -> None:
        """Raises ApiError 404."""
        self._num_bytes -= self.find(response_id).num_bytes
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


def _size(value: Any) -> int:
    """Roughly the bytes of a value of JSON, or of items, in memory."""
    num_bytes, left = 0, [value]  # a loop, as JSON may be nested more deeply than calls
    while left:
        value = left.pop()
        num_bytes += sys.getsizeof(value)
        if isinstance(value, BaseModel):
            left.append(value.__dict__)
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    return num_bytes
