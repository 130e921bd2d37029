"""What must stay bounded: errors about bodies with many entries, and stored responses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from jaxpage.server.errors import ApiError
from jaxpage.server.protocol.chat import ChatRequest
from jaxpage.server.protocol.completions import CompletionRequest
from jaxpage.server.protocol.messages import MessagesRequest
from jaxpage.server.protocol.pooling import EmbeddingRequest, RerankRequest
from jaxpage.server.protocol.response_items import Message, read_items
from jaxpage.server.protocol.responses import ResponsesRequest
from jaxpage.server.response_store import ResponseStore, StoredResponse

MANY = 10_000
RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "1", "content": [1] * MANY}],
}


@pytest.mark.parametrize(
    ("request_type", "body"),
    [
        (CompletionRequest, {"prompt": ["a"] * MANY + [None]}),
        (CompletionRequest, {"prompt": [[None]] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ResponsesRequest, {"input": [1] * MANY}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [1] * MANY}]}),
        (MessagesRequest, {"max_tokens": 1, "messages": [1] * MANY}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [1] * MANY}]}),
        (MessagesRequest, {"max_tokens": 1, "messages": [RESULT]}),
        (EmbeddingRequest, {"input": [None] * MANY}),
        (RerankRequest, {"query": "a", "documents": [1] * MANY}),
    ],
)
def test_the_first_wrong_entry_is_reported(request_type: type[BaseModel], body: dict[str, Any]):
    """An error for each of a million prompts, in each form that they could have, took 2.3 GB and 9 s."""
    with pytest.raises(ValidationError) as caught:
        request_type.model_validate(body)
    assert caught.value.error_count() <= 5


def stored(number: int, num_chars: int) -> StoredResponse:
    items = tuple(read_items([{"role": "user", "content": "x" * num_chars}]))
    response = {"id": f"resp_{number}", "status": "in_progress", "output": []}
    return StoredResponse(items=items, response=response, request_ids=())


def kept(store: ResponseStore, *numbers: int) -> list[int]:
    found = []
    for number in numbers:
        try:
            store.find(f"resp_{number}")
        except ApiError as error:
            assert error.status == 404 and "no more than 1 MiB" in error.message
        else:
            found.append(number)
    return found


def test_stored_responses_are_evicted_when_they_are_too_large_together():
    store = ResponseStore(10, max_bytes=2**20)
    responses = [stored(i, 300_000) for i in range(5)]
    for response in responses[:3]:
        store.add(response)
    assert kept(store, 0, 1, 2) == [0, 1, 2]
    store.add(responses[3])
    assert kept(store, 0, 1, 2, 3) == [1, 2, 3]
    text = {"type": "output_text", "text": "y" * 300_000}
    ended = responses[3].response | {"status": "completed", "output": [{"content": [text]}]}
    store.update(responses[3], ended)
    assert kept(store, 1, 2, 3) == [2, 3] and store.find("resp_3").response is ended
    store.update(responses[0], responses[0].response | {"status": "completed"})  # evicted before
    store.remove("resp_2")
    store.add(responses[4])
    assert kept(store, 3, 4) == [3, 4]
    store.add(stored(5, 2**21))  # the newest is always kept
    assert kept(store, 3, 4, 5) == [5] and len(store) == 1
    store.remove("resp_5")
    assert store._num_bytes == 0


def test_pictures_and_many_small_items_count():
    store = ResponseStore(10, max_bytes=2**20)
    small = tuple(Message(role="user", content=[]) for _ in range(2000))
    picture = [{"type": "input_image", "image_url": "data:" + "x" * 600_000}]
    seen = tuple(read_items([{"role": "user", "content": picture}]))
    for number, items in enumerate((small, seen)):
        response = {"id": f"resp_{number}"}
        store.add(StoredResponse(items=items, response=response, request_ids=()))
    assert kept(store, 0, 1) == [1]
