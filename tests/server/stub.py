"""A server that talks as ours does and computes nothing: the last word of a message says what it answers.

`python -m tests.server.stub PORT` serves the page on 127.0.0.1, with answers for every kind of thing it must show.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from jaxpage.server.errors import ApiError
from jaxpage.server.limits import KeyCheck
from jaxpage.server.page import page_router
from tests.server.fake_llm import FakeLLM, call_id

TEXT = """Paged attention keeps the keys and values of a sequence in blocks of a fixed size, which need not be \
neighbours. A block table says where they are.

```python
def slot(block_table, position, block_size=16):
    return block_table[position // block_size] * block_size + position % block_size
```

So memory is taken as the sequence grows, and sequences with a common prefix share its blocks."""
MARKUP = '<img src=x onerror="document.title=\'broken\'"><script>document.title="broken"</script> **bold** & more'
JSON = '{"name": "Ada", "age": 36, "tags": ["maths", "engines"], "id": 12345678901234567890, "none": {}}'
REASONING = "The user asks for a plan. First the facts, then what follows from them, then a check of the result."


class Stub:
    """What the tests may turn: a key that is asked for, and what was asked."""

    def __init__(self, *, key: str | None = None, delay: float = 0.01, llm: Any = None):
        self.key = key
        self.delay = delay  # seconds between two chunks
        self.requests: list[dict[str, Any]] = []
        self.num_disconnects = 0
        self.llm = llm or FakeLLM()
        self.app = _make_app(self)


def _make_app(stub: Stub) -> FastAPI:
    app = FastAPI(exception_handlers={ApiError: _report})
    app.include_router(page_router(stub.llm))
    app.add_middleware(KeyCheck, keys=[stub.key] if stub.key else [], admin_key=None)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": "stub-0.5b"}, {"id": "a-model-with-a-rather-long-name-instruct"}],
        }

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        stub.requests.append(body)
        if _kind(body) == "refuse":
            raise ApiError(400, "temperature must be in [0, 2], got 9.0", param="temperature")
        if _kind(body) == "busy":
            raise ApiError(503, "the queue is full", headers={"Retry-After": "7"})
        return StreamingResponse(_stream(stub, body), media_type="text/event-stream")

    return app


async def _report(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


def _kind(body: dict[str, Any]) -> str:
    last = body["messages"][-1]
    if last["role"] == "tool":
        return "result"
    content = last["content"]
    said = content if isinstance(content, str) else content[-1].get("text", "text")
    return said.split()[-1]


async def _stream(stub: Stub, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The chunks of an answer, cut where no reader expects it."""
    kind = _kind(body)
    rest = b""
    try:
        async for event in _events(kind, body, stub.delay):
            rest += event.encode()
            cut = max(0, len(rest) - 7)  # the end of an event comes with the next one
            yield rest[:cut]
            rest = rest[cut:]
        yield rest
    except asyncio.CancelledError:
        stub.num_disconnects += 1
        raise


async def _events(kind: str, body: dict[str, Any], delay: float) -> AsyncIterator[str]:
    deltas = _deltas(kind, body)
    has_calls = any("tool_calls" in delta for delta in deltas)
    yield ": a comment\n\n"
    yield _event({"choices": [_choice({"role": "assistant", "content": ""})]})
    for number, delta in enumerate(deltas):
        await asyncio.sleep(delay)
        if kind == "error" and number == 12:
            yield _event(
                {"error": {"message": "the step that computed this request failed", "code": 500}}
            )
            return
        if kind == "break" and number == 12:
            return
        yield _event({"choices": [_choice(delta, body)]})
    reason = "tool_calls" if has_calls else "length" if kind == "long" else "stop"
    yield _event(
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": None}]}
    )
    usage = {
        "prompt_tokens": 120,
        "completion_tokens": len(deltas),
        "prompt_tokens_details": {"cached_tokens": 96},
    }
    yield _event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _deltas(kind: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    match kind:
        case "reason":
            return [{"reasoning": piece} for piece in _pieces(REASONING)] + _contents(TEXT)
        case "json":
            return _contents(JSON)
        case "markup":
            return _contents(MARKUP)
        case "tool":
            return _contents("I look it up. ") + _calls()
        case "result":
            results = [m["content"] for m in body["messages"] if m["role"] == "tool"]
            return _contents(f"The tools say: {'; '.join(results)}")
        case "long":
            return _contents(TEXT * 20)
        case _:
            return _contents(TEXT)


def _calls() -> list[dict[str, Any]]:
    found = []
    for index, city in enumerate(("Paris", "Rome")):
        function = {"name": "get_weather", "arguments": ""}
        call = {"index": index, "id": f"call_{index}", "type": "function", "function": function}
        found.append({"tool_calls": [call]})
        for piece in _pieces(json.dumps({"city": city, "days": 3})):
            found.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    return found


def _contents(text: str) -> list[dict[str, Any]]:
    return [{"content": piece} for piece in _pieces(text)]


def _pieces(text: str) -> list[str]:
    return [text[i : i + 5] for i in range(0, len(text), 5)]


def _choice(delta: dict[str, Any], body: dict[str, Any] | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    if body and body.get("logprobs"):
        text = delta.get("content") or delta.get("reasoning") or ""
        choice["logprobs"] = {"content": [_token(text, body.get("top_logprobs", 0))]}
    return choice


def _token(text: str, num_best: int) -> dict[str, Any]:
    """A token with a probability that follows from its text, and alternatives."""
    probability = (0.02, 0.2, 0.45, 0.75, 0.97, 0.999)[sum(map(ord, text)) % 6]
    others = [(f" alt{i}", (1 - probability) / 2 ** (i + 1)) for i in range(max(0, num_best - 1))]
    best = sorted([(text, probability), *others], key=lambda pair: -pair[1])[:num_best]
    named = [{"token": t, "logprob": math.log(p), "bytes": list(t.encode())} for t, p in best]
    return {
        "token": text,
        "logprob": math.log(probability),
        "bytes": list(text.encode()),
        "top_logprobs": named,
    }


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps({'id': f'chatcmpl-{call_id(3)}', 'object': 'chat.completion.chunk', **body})}\n\n"


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(Stub(delay=0.03).app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
