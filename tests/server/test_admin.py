"""Which requests an administrator aborts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from jaxpage.server import admin
from jaxpage.server.batch import InFlight


class Engine:
    """Remembers what it was told to abort."""

    def __init__(self):
        self.aborted: list[str] = []

    async def abort(self, ids: list[str]) -> None:
        self.aborted += ids


def aborted(call_ids: list[str], body: Any) -> list[str]:
    """Which of the calls end."""
    llm, in_flight = Engine(), InFlight(max_requests=10, rejected=lambda: None)
    calls = {engine_id: i for i in call_ids for engine_id in in_flight.enter(i, 1)}
    server: Any = SimpleNamespace(llm=llm, in_flight=in_flight)
    app = FastAPI()
    app.include_router(admin.router(server))
    with TestClient(app) as client:
        answer = client.post("/abort_requests", json=body)
    assert answer.json() == {"aborted": len(llm.aborted)}
    return [calls[i] for i in llm.aborted]


NAMES = ["one", "chatcmpl-123", "cmpl-5", "resp_x"]


@pytest.mark.parametrize("body", [None, {}, {"request_ids": None}])
def test_all_are_aborted_whatever_their_names(body):
    assert aborted(NAMES, body) == NAMES


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("one", ["one"]),
        ("cmpl-one", ["one"]),
        ("resp_one", ["one"]),
        ("chatcmpl-123", ["chatcmpl-123"]),
        ("chatcmpl-chatcmpl-123", ["chatcmpl-123"]),
        ("chatcmpl-cmpl-5", ["cmpl-5"]),
        ("cmpl-resp_x", ["resp_x"]),
        ("123", []),
        ("two", []),
    ],
)
def test_an_id_is_found_with_and_without_its_prefix(asked, found):
    assert aborted(NAMES, {"request_ids": [asked]}) == found


def test_the_id_that_is_the_same_goes_before_the_one_without_its_prefix():
    assert aborted(["1", "cmpl-1"], {"request_ids": ["cmpl-1"]}) == ["cmpl-1"]
