"""Which field of a request an error is about, and what an application does with what its handlers raise."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxpage.async_llm import EngineAsleepError, EngineDeadError
from jaxpage.prompts import too_long
from jaxpage.server.app import empty_app
from jaxpage.server.errors import to_api_error


@pytest.mark.parametrize(
    ("contains", "param"), [("9 input tokens", "input_tokens"), ("9 characters", "input_text")]
)
@pytest.mark.parametrize("where", ["", "prompt 1 of 2: "])
def test_a_prompt_that_is_too_long_is_recognised_by_its_message(where, contains, param):
    error = to_api_error(ValueError(f"{where}{too_long(8, contains)}; shorten it"))
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("error", "status"), [(EngineAsleepError("asleep"), 409), (EngineDeadError("dead"), 503)]
)
def test_the_state_of_an_engine_is_an_answer_not_a_crash(error, status):
    """What the application lets through ends in a stack trace and closes the connection."""
    server: Any = None
    app, sent = empty_app(server), []

    @app.get("/")
    async def fail() -> None:
        raise error

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == status
    assert json.loads(sent[1]["body"])["error"]["message"] == str(error)
