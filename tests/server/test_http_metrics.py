"""HTTP requests are counted by route, whatever clients ask for."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from jaxpage.server.metrics import Metrics
from tests.server.stubs import Scrape, StubLLM


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(StubLLM(), "demo")


@pytest.fixture
def app(metrics) -> FastAPI:
    app = FastAPI()
    router = APIRouter(prefix="/v1")

    @router.get("/responses/{response_id}")
    async def response(response_id: str) -> str:
        if response_id == "missing":
            raise HTTPException(404)
        if response_id == "broken":
            raise RuntimeError("a bug")
        return response_id

    @router.get("/stream")
    async def stream() -> StreamingResponse:
        async def chunks():
            yield b"a"
            await asyncio.sleep(0.06)
            yield b"b"

        return StreamingResponse(chunks())

    @app.get("/metrics")
    async def render() -> str:
        return ""

    app.include_router(router)
    app.add_middleware(metrics.http.middleware)
    return app


def call(app, path: str, *, method: str = "GET") -> None:
    """One request, as a server passes it to the application."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1234),
    }

    received = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        if not received:
            await asyncio.Event().wait()  # the client stays
        return received.pop()

    async def send(message):
        pass

    asyncio.run(app(scope, receive, send))


def counted(metrics: Metrics) -> dict[tuple[str, str, str], float]:
    samples = Scrape(metrics.render()).samples
    return {
        (s.labels["handler"], s.labels["method"], s.labels["status"]): s.value
        for s in samples
        if s.name == "http_requests_total"
    }


def test_a_route_counts_under_its_template(app, metrics):
    for path in ("a", "b", "missing"):
        call(app, f"/v1/responses/{path}")
    with pytest.raises(RuntimeError, match="a bug"):
        call(app, "/v1/responses/broken")
    route = "/v1/responses/{response_id}"
    assert counted(metrics) == {
        (route, "GET", "200"): 2,
        (route, "GET", "404"): 1,
        (route, "GET", "500"): 1,
    }
    found = Scrape(metrics.render())
    assert found["http_request_duration_seconds_count", f"handler={route}"] == 4


def test_clients_cannot_make_labels(app, metrics):
    for number in range(3):
        call(app, f"/nowhere/{number}")
        call(app, "/v1/stream", method=f"METHOD{number}")
    assert counted(metrics) == {("none", "GET", "404"): 3, ("/v1/stream", "other", "405"): 3}


def test_a_stream_lasts_until_its_end(app, metrics):
    call(app, "/v1/stream")
    seconds = Scrape(metrics.render())["http_request_duration_seconds_sum", "handler=/v1/stream"]
    assert seconds >= 0.06


def test_what_watches_the_server_is_not_counted(app, metrics):
    call(app, "/metrics")
    assert counted(metrics) == {}


def test_a_client_that_leaves_before_an_answer(metrics):
    async def gives_up(scope, receive, send):
        pass

    call(metrics.http.middleware(gives_up), "/x")
    assert counted(metrics) == {("none", "GET", "499"): 1}


def test_other_protocols_pass(metrics):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(metrics.http.middleware(app)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"] and counted(metrics) == {}
