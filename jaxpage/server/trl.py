"""The additional paths of TRL's `VLLMClient`: many prompts in, token ids and logprobs out. With `--enable-rl`.

Older clients use them. Newer ones, such as 1.16's, sample and score through OpenAI's paths.

Weights are not sent TRL's way, by NCCL between GPUs, but read from a checkpoint: `/update_weights`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpage.input_processor import InputProcessor
from jaxpage.outputs import RequestOutput
from jaxpage.rl.scoring import make_scored, scoring_params
from jaxpage.server.batch import Asked, Batch, Caller
from jaxpage.server.context import Server
from jaxpage.server.errors import ApiError
from jaxpage.server.protocol.trl import Chat, Generate, Score

_NO_NCCL = (
    "weights are not taken over NCCL: write them as safetensors or with Orbax where this server can read them, and "
    'POST /update_weights {"model_path": FOLDER}'
)


class _BatchCall:
    """All prompts of a call, answered together. It must be closed."""

    def __init__(self, batch: Batch, write: Callable[[list[RequestOutput]], dict[str, Any]]):
        self._batch, self._write = batch, write

    async def response(self) -> dict[str, Any]:
        """See `Call`."""
        return self._write(await self._batch.last_outputs())

    def chunks(self) -> Any:
        """See `Call`."""
        raise AssertionError("these calls have no stream")

    def close(self) -> None:
        """See `Call`."""
        self._batch.close()


async def _sample(server: Server, body: Generate | Chat, caller: Caller) -> _BatchCall:
    body.warn_of_unknown()

    def read(inputs: InputProcessor) -> Asked:
        return Asked(prompts=body.parse(inputs), params=body.params())

    num_prompts = len(body.prompts if isinstance(body, Generate) else body.messages)
    batch, _ = await server.start(caller, read, num_prompts=num_prompts)
    return _BatchCall(batch, _sampled)


async def _score(server: Server, body: Score, caller: Caller) -> _BatchCall:
    body.warn_of_unknown()
    body.check()

    def read(inputs: InputProcessor) -> Asked:
        prompts = inputs.parse([{"prompt_token_ids": each} for each in body.sequences])
        (params,) = scoring_params(body.sequences[:1], None, body.top_logprobs)
        return Asked(prompts=prompts, params=params)

    batch, _ = await server.start(caller, read, num_prompts=len(body.sequences))
    return _BatchCall(batch, lambda outputs: _scored(outputs, body))


def router(
    server: Server,
    answer: Callable[..., Any],
) -> APIRouter:
    """TRL's paths, which end with a slash. `answer`: that of `app`."""
    routes = APIRouter()

    @routes.get("/get_world_size/")
    async def get_world_size() -> dict[str, int]:
        config = server.llm.config
        return {"world_size": (config.tensor_parallel_size or 1) * config.data_parallel_size}

    @routes.post("/generate/")
    async def generate(body: Generate, request: Request) -> Response:
        return await answer(server, body, request, _sample)

    @routes.post("/chat/")
    async def chat(body: Chat, request: Request) -> Response:
        return await answer(server, body, request, _sample)

    @routes.post("/get_sequence_logprobs/")
    async def get_sequence_logprobs(body: Score, request: Request) -> Response:
        return await answer(server, body, request, _score)

    @routes.get("/server_info")
    async def server_info() -> Response:
        # Newer clients call this only before they send weights; they show the answer.
        raise ApiError(501, _NO_NCCL)

    @routes.post("/init_communicator/")
    async def init_communicator() -> Response:
        raise ApiError(501, _NO_NCCL)

    @routes.post("/update_named_param/")
    async def update_named_param() -> Response:
        raise ApiError(501, _NO_NCCL)

    @routes.post("/close_communicator/")
    async def close_communicator() -> dict[str, str]:
        return {"message": "there is none"}

    return routes


def _sampled(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    completions = [completion for output in outputs for completion in output.outputs]
    logprobs = token_ids = None
    if all(completion.logprobs is not None for completion in completions):
        ranked = [
            [_by_rank(entry) for entry in completion.logprobs or ()] for completion in completions
        ]
        logprobs = [[[value for _, value in entry] for entry in each] for each in ranked]
        token_ids = [[[token for token, _ in entry] for entry in each] for each in ranked]
    return {
        "prompt_ids": [list(output.prompt_token_ids) for output in outputs],
        "completion_ids": [list(completion.token_ids) for completion in completions],
        "logprobs": logprobs,
        "logprob_token_ids": token_ids,
    }


def _by_rank(entry: Any) -> list[tuple[int, float | None]]:
    """(token, logprob), the most likely first."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [(token, _finite(each.logprob)) for token, each in ranked]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _scored(outputs: Sequence[RequestOutput], body: Score) -> dict[str, Any]:
    """Scores of the tokens after each prompt, padded to the longest; a sequence's first token has no logprob."""
    found = make_scored(outputs, body.top_logprobs)
    lengths = [
        length - start
        for length, start in zip(found.lengths.tolist(), body.prompt_lengths, strict=True)
    ]
    shape = (len(lengths), max(lengths))
    own = np.full((*shape, 1), -np.inf, np.float32), np.zeros((*shape, 1), np.int32)
    top = (
        np.full((*shape, body.top_logprobs), -np.inf, np.float32),
        np.zeros((*shape, body.top_logprobs), np.int32),
    )
    for row, (start, length) in enumerate(zip(body.prompt_lengths, lengths, strict=True)):
        # The first token of a sequence has no context.
        first = 1 if start == 0 and length else 0
        of, to = slice(start + first, start + length), slice(first, length)
        own[0][row, to, 0] = found.logprobs[row, of]
        own[1][row, :length, 0] = body.sequences[row][start:]
        top[0][row, to] = found.top_logprobs[row, of]
        top[1][row, to] = found.top_token_ids[row, of]
    if body.response_format == "binary":
        return {
            "logprobs_b64": _base64(top[0]),
            "token_ids_b64": _base64(top[1]),
            "actual_logprobs_b64": _base64(own[0]),
            "actual_token_ids_b64": _base64(own[1]),
            "shape": [*shape, body.top_logprobs],
            "completion_lengths": lengths,
        }
    entries = [
        [_entries(top, own, row, i) for i in range(length)] for row, length in enumerate(lengths)
    ]
    return {
        "logprobs": [[[value for _, value in each] for each in row] for row in entries],
        "logprob_token_ids": [[[token for token, _ in each] for each in row] for row in entries],
    }


def _entries(
    top: tuple[np.ndarray, np.ndarray], own: tuple[np.ndarray, np.ndarray], row: int, i: int
) -> list[tuple[int, float | None]]:
    """(token, logprob) of the best tokens at one position, and of the actual token if it is not among them."""
    if not np.isfinite(own[0][row, i, 0]):
        return []
    found = dict(zip(top[1][row, i].tolist(), top[0][row, i].tolist(), strict=True))
    found.setdefault(int(own[1][row, i, 0]), float(own[0][row, i, 0]))
    return [(token, _finite(value)) for token, value in found.items()]


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")
