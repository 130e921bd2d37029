"""The application of a pooling model: embeddings, classes, scores, ranks and raw numbers, in vLLM's formats."""

from __future__ import annotations

import base64
import dataclasses
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from jaxpage.pooling.async_pooler import AsyncPooler
from jaxpage.pooling.pooler import ModelInfo, Pooler, Work
from jaxpage.prompts import Prompt
from jaxpage.server import operation, tokens
from jaxpage.server.adapters import ServedAdapters
from jaxpage.server.app import add_checks, empty_app
from jaxpage.server.batch import InFlight
from jaxpage.server.context import Server, model_names
from jaxpage.server.errors import ApiError, to_answer_error, to_api_error
from jaxpage.server.options import ServerOptions
from jaxpage.server.pooling_metrics import PoolingMetrics
from jaxpage.server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    InputFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxpage.server.response_store import ResponseStore
from jaxpage.server.streaming import until_disconnected
from jaxpage.server.texts import check_length, check_messages

Outputs = list[Any]
Body = dict[str, Any]


def make_pooling_app(llm: AsyncPooler, options: ServerOptions) -> tuple[FastAPI, Server]:
    """An ASGI application, and its server."""
    server = _server(llm, options)
    app = empty_app(server)
    app.include_router(operation.router(server))
    app.include_router(tokens.router(server))
    _add_calls_of_texts(app, server, llm)
    _add_calls_of_pairs(app, server, llm)
    _add_refusals(app, llm.info)
    add_checks(app, server)
    return app, server


def _server(llm: AsyncPooler, options: ServerOptions) -> Server:
    config, engine = llm.config, _as_any(llm)
    names = model_names(options, config.model)
    metrics = PoolingMetrics(llm, names[0])
    return Server(
        llm=engine,
        # The throughput line is about generation.
        options=dataclasses.replace(options, disable_log_stats=True),
        in_flight=InFlight(
            max_requests=config.max_num_seqs + options.max_queued_requests,
            rejected=metrics.rejected,
        ),
        responses=ResponseStore(options.max_stored_responses),
        model_names=names,
        metrics=_as_any(metrics),
        adapters=ServedAdapters(engine, (), names),
    )


def _as_any(value: Any) -> Any:
    """For objects with the needed methods in place of a generating server's types."""
    return value


def _add_calls_of_texts(app: FastAPI, server: Server, llm: AsyncPooler) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        def prepare(pooler: Pooler) -> Work:
            return pooler.embed(_prompts(pooler, body, body.prompt_name), body.params())

        def make(outputs: Outputs) -> Body:
            found = [output.outputs.embedding for output in outputs]
            return {"data": _items("embedding", "embedding", found, body)}

        return await _respond(server, llm, _Call(body, request, _num_inputs(body), prepare, make))

    @app.post("/classify")
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        def prepare(pooler: Pooler) -> Work:
            return pooler.classify(_prompts(pooler, body), body.params())

        def make(outputs: Outputs) -> Body:
            return {"data": [_class(i, o.outputs.probs, llm.info) for i, o in enumerate(outputs)]}

        return await _respond(server, llm, _Call(body, request, _num_inputs(body), prepare, make))

    @app.post("/pooling")
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        def prepare(pooler: Pooler) -> Work:
            prompts = _prompts(pooler, body, body.prompt_name)
            return pooler.encode(prompts, body.params(task=body.task))

        def make(outputs: Outputs) -> Body:
            found = [output.outputs.data for output in outputs]
            return {"data": _items("pooling", "data", found, body)}

        return await _respond(server, llm, _Call(body, request, _num_inputs(body), prepare, make))


def _add_calls_of_pairs(app: FastAPI, server: Server, llm: AsyncPooler) -> None:
    @app.post("/score")
    @app.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> Response:
        first, second = body.pair()
        num_texts = len(second) if isinstance(second, list) else 1

        def prepare(pooler: Pooler) -> Work:
            ones, others = body.cut(pooler.inputs, first, second)
            return pooler.score(ones, others, body.params(), body.tokenization())

        def make(outputs: Outputs) -> Body:
            scores = [output.outputs.score for output in outputs]
            return {
                "data": [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)]
            }

        return await _respond(server, llm, _Call(body, request, num_texts, prepare, make))

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        texts = body.texts()

        def prepare(pooler: Pooler) -> Work:
            query, documents = body.cut(pooler.inputs, body.query, texts)
            return pooler.score(query, documents, body.params(), body.tokenization())

        def make(outputs: Outputs) -> Body:
            return {"results": _ranked(texts, outputs, body.top_n)}

        return await _respond(server, llm, _Call(body, request, len(texts), prepare, make))


_PREFIXES = {
    "EmbeddingRequest": "embd",
    "ClassifyRequest": "classify",
    "PoolingRequest": "pool",
    "ScoreRequest": "score",
    "RerankRequest": "rerank",
}


@dataclasses.dataclass(frozen=True)
class _Call:
    """An HTTP call: its texts are counted before they are parsed."""

    body: PoolingFields
    request: Request
    num_texts: int
    prepare: Callable[[Pooler], Work]
    make: Callable[[Outputs], Body]


@dataclasses.dataclass(frozen=True)
class _Computation:
    """A call's computation, for `until_disconnected`."""

    llm: AsyncPooler
    work: Work

    async def response(self) -> dict[str, Any]:
        return {"outputs": await self.llm.compute(self.work)}

    def chunks(self) -> Any:
        raise NotImplementedError("there are no streams of vectors")

    def close(self) -> None:
        """Nothing to do: work that was cancelled before its start is not computed."""


async def _respond(server: Server, llm: AsyncPooler, call: _Call) -> Response:
    body, request = call.body, call.request
    body.warn_of_unknown()
    server.check_model(body.model)
    call_id = (request.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex)[:256]
    ids = server.in_flight.enter(call_id, max(1, call.num_texts))
    try:
        try:
            work = await llm.read(call.prepare)
        except (ValueError, TypeError) as error:
            raise to_api_error(error, frozenset(type(body).model_fields)) from error
        try:
            found = await until_disconnected(request.receive, _Computation(llm, work))
        except Exception as error:
            raise to_answer_error(error) from error
    finally:
        server.in_flight.leave(call_id, ids)
    if found is None:
        return Response(status_code=499)  # not sent to anyone
    kind = type(body).__name__
    whole = {
        "id": f"{_PREFIXES[kind]}-{call_id}",
        "object": "list",
        "created": int(time.time()),
        "model": server.model_name,
        **call.make(found["outputs"]),
        "usage": {
            "prompt_tokens": work.num_tokens,
            "total_tokens": work.num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }
    if kind == "RerankRequest":
        del whole["object"], whole["created"]
    return JSONResponse(whole, headers={"X-Request-Id": call_id})


def _num_inputs(body: InputFields) -> int:
    return len(body.prompts()) or 1


def _prompts(pooler: Pooler, body: InputFields, prompt_name: str | None = None) -> list[Prompt]:
    """The input as token ids. Raises ValueError."""
    inputs, length = pooler.inputs, body.truncate_prompt_tokens
    options = body.tokenization()
    if body.messages is not None:
        if length is None:
            check_messages(body.messages, _as_any(inputs))
        return inputs.parse_chat(
            body.messages,
            add_generation_prompt=False,
            chat_template_kwargs=body.chat_template_kwargs,
            tokenization_kwargs=options | {"add_special_tokens": None},
        )
    given = body.prompts()
    for prompt in given if length is None else ():
        check_length(prompt, _as_any(inputs))
    return inputs.parse(given, options, prompt_name=prompt_name)


def _items(kind: str, name: str, found: list[Any], body: EmbeddingRequest) -> list[Body]:
    return [
        {"index": i, "object": kind, name: _encoded(numbers, body)}
        for i, numbers in enumerate(found)
    ]


_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


def _encoded(numbers: Any, body: EmbeddingRequest) -> Any:
    if body.encoding_format == "base64":
        found = np.asarray(numbers, np.float32).astype(_DTYPES[body.embed_dtype])
        if body.endianness not in ("native", sys.byteorder):
            found = found.view(f"u{found.itemsize}").byteswap()
        return base64.b64encode(found.tobytes()).decode()
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


def _class(index: int, probs: list[float], info: ModelInfo) -> Body:
    best = int(np.argmax(probs))
    label = info.labels.get(best)
    return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}


def _ranked(texts: list[str], outputs: Outputs, top_n: int) -> list[Body]:
    """Sorted, the best first."""
    scores = [output.outputs.score for output in outputs]
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    return [
        {"index": i, "document": {"text": texts[i]}, "relevance_score": scores[i]}
        for i in order[: top_n or None]
    ]


def _add_refusals(app: FastAPI, info: ModelInfo) -> None:
    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    @app.post("/v1/responses")
    @app.post("/v1/messages")
    async def generate() -> Response:
        raise ApiError(
            400, f"{info.name} does not generate text: its tasks are {' and '.join(info.tasks)}"
        )
