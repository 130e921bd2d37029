"""What the front does with answers, refusals and replicas that fail. The replicas are scripts; no Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import httpx2 as httpx  # comes with openai
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import StreamingResponse

from jaxpage.ray_serve.call import Call, ReplicaFailedError, WholeAnswer, messages, whole_answer
from jaxpage.ray_serve.front import front_app

DIES = object()
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


def start(status: int = 200, headers=()) -> dict:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, more: bool = False) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Scripted:
    """Replicas that answer one call after the other as they are told."""

    def __init__(self, *scripts: list):
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.num_closed = 0
        self.whole: list[WholeAnswer] = []

    async def answer(self, call: Call) -> AsyncGenerator[tuple[str, list], None]:
        self.calls.append(call)
        replica = f"replica {len(self.calls)}"
        try:
            yield replica, []
            for message in self.scripts.pop(0):
                if message is DIES:
                    raise ReplicaFailedError("killed")
                yield replica, [message]
        finally:
            self.num_closed += 1

    async def answer_everywhere(self, call: Call) -> list[WholeAnswer]:
        self.calls.append(call)
        return self.whole


def ask(replicas, method="POST", path="/v1/completions", max_body_size=2**20, **more):
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app=front_app(replicas, max_body_size))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.request(method, path, **more)

    return asyncio.run(one())


def test_an_answer_is_passed_on_as_it_is():
    replicas = Scripted([start(201, [(b"x-a", b"b")]), body(b"one", True), body(b"two")])
    answer = ask(replicas, path="/v1/x?y=z", json={"prompt": "p" * 600}, headers={"X-Q": "1"})
    assert (answer.status_code, answer.content, answer.headers["x-a"]) == (201, b"onetwo", "b")
    (call,) = replicas.calls
    assert (call.path, call.scope["query_string"]) == ("/v1/x", b"y=z")
    assert (b"x-q", b"1") in call.scope["headers"]
    assert json.loads(call.body) == {"prompt": "p" * 600} and len(call.prefix) == 2


@pytest.mark.parametrize(
    "first",
    [[DIES], [start(), DIES], [start(503), body(b"full")], [start(529), body(b"full")]],
    ids=["at once", "start", "503", "529"],
)
def test_another_replica_answers_if_nothing_was_sent(first):
    replicas = Scripted(first, [start(), body(b"fine")])
    answer = ask(replicas, json={})
    assert (answer.status_code, answer.content) == (200, b"fine")
    assert [call.avoid for call in replicas.calls] == [frozenset(), {"replica 1"}]
    assert replicas.num_closed == 2


def test_there_is_no_third_try():
    replicas = Scripted([DIES], [start(), DIES])
    answer = ask(replicas, json={})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    full = start(503, [(b"retry-after", b"7")])
    replicas = Scripted([full, body(b"full")], [full, body(b"full as well")])
    answer = ask(replicas, json={})
    assert (answer.status_code, answer.content) == (503, b"full as well")


def test_a_stream_that_breaks_off_ends_with_an_error():
    replicas = Scripted([start(200, SSE), body(b"data: 1\n\n", True), DIES])
    answer = ask(replicas, json={})
    assert len(replicas.calls) == 1
    first, error, done = answer.text.split("\n\n")[:3]
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503


def test_anthropic_s_clients_are_told_in_their_format():
    answer = ask(Scripted([DIES], [DIES]), path="/v1/messages", json={})
    assert answer.status_code == 529 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "overloaded_error"
    replicas = Scripted([start(200, SSE), body(b"event: ping\n\n", True), DIES])
    _, error = ask(replicas, path="/v1/messages", json={}).text.removesuffix("\n\n").split("\n\n")
    name, data = error.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"


def test_another_answer_that_breaks_off_is_no_answer():
    with pytest.raises(ConnectionError):
        ask(Scripted([start(), body(b"{", True), DIES]), json={})


def test_a_body_that_is_too_large_goes_to_nobody():
    replicas = Scripted()
    assert ask(replicas, content=b"x" * 11, max_body_size=10).status_code == 413
    assert replicas.calls == []


def test_administration_is_for_all_replicas():
    replicas = Scripted()
    json_type = [(b"content-type", b"application/json"), (b"content-length", b"13")]
    replicas.whole = [
        WholeAnswer(replica=name, status=200, headers=json_type, body=b'{"aborted":%d}' % number)
        for name, number in (("a", 1), ("b", 12))
    ]
    assert ask(replicas, path="/abort_requests").json() == {"aborted": 13}
    replicas.whole[1] = WholeAnswer(replica="b", status=409, headers=[], body=b"no")
    answer = ask(replicas, path="/reset_prefix_cache")
    assert (answer.status_code, answer.content) == (409, b"no")
    replicas.whole = []
    assert ask(replicas, path="/pause").status_code == 503


def test_metrics_say_which_replica_they_are_of():
    text = b"""# HELP vllm:a_total Things.
# TYPE vllm:a_total counter
vllm:a_total{model_name="m\\"n"} %d.0
# HELP vllm:h Seconds.
# TYPE vllm:h histogram
vllm:h_bucket{le="+Inf"} 2.0
vllm:h_count 2.0
vllm:h_sum 3.0
"""
    replicas = Scripted()
    replicas.whole = [
        WholeAnswer(replica=name, status=200, headers=[], body=text % number)
        for name, number in (("x", 1), ("y", 2))
    ]
    lines = ask(replicas, "GET", "/metrics").text.splitlines()
    assert 'vllm:a_total{model_name="m\\"n",replica="x"} 1.0' in lines
    assert 'vllm:a_total{model_name="m\\"n",replica="y"} 2.0' in lines
    assert 'vllm:h_bucket{le="+Inf",replica="y"} 2.0' in lines
    assert lines.count("# TYPE vllm:a_total counter") == 1


app = FastAPI()
ended: list[str] = []


@app.post("/echo")
async def echo(request: Request):
    return {"got": (await request.body()).decode(), "query": request.url.query}


@app.get("/fails")
async def fails():
    raise RuntimeError("a bug")


@app.get("/forever")
async def forever():
    async def parts():
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0)
        finally:
            ended.append("forever")

    return StreamingResponse(parts())


def call_of(method: str, path: str, data: bytes = b"", query: bytes = b"") -> Call:
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": []}
    return Call(scope=scope, body=data)


def test_an_application_answers_a_call():
    answer = asyncio.run(whole_answer(app, call_of("POST", "/echo", b"hi", b"a=1"), "r"))
    assert (answer.status, answer.replica) == (200, "r")
    assert json.loads(answer.body) == {"got": "hi", "query": "a=1"}
    assert (b"content-type", b"application/json") in answer.headers


def test_an_answer_counts_even_if_the_application_raises_after_it():
    assert asyncio.run(whole_answer(app, call_of("GET", "/fails"), "r")).status == 500


def test_what_breaks_in_the_middle_is_raised():
    async def breaks(scope, receive, send):
        await send(start())
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        asyncio.run(whole_answer(breaks, call_of("GET", "/"), "r"))


def test_closing_ends_the_application():
    async def close_soon():
        parts = messages(app, call_of("GET", "/forever"))
        while not any(m.get("body") for m in await anext(parts)):
            pass
        await parts.aclose()

    ended.clear()
    asyncio.run(close_soon())
    assert ended == ["forever"]
