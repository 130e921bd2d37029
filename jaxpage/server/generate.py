"""`POST /inference/v1/generate`: vLLM's API with token ids as input and output."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

from jaxpage.input_processor import InputProcessor
from jaxpage.outputs import CompletionOutput
from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.server.batch import Asked, Batch, Caller
from jaxpage.server.context import Server
from jaxpage.server.logprobs import generate_logprobs, prompt_logprobs, token_id_logprobs
from jaxpage.server.protocol.sampling import make_params
from jaxpage.server.protocol.tokens import GenerateRequest


class GenerateCall:
    """A running call. It must be closed."""

    @classmethod
    async def start(cls, server: Server, body: GenerateRequest, caller: Caller) -> GenerateCall:
        """Raises ValueError, ApiError or EngineDeadError before anything is computed."""
        body.warn_of_unknown()
        adapter = server.check_model(body.model)

        def read(inputs: InputProcessor) -> Asked:
            # Without a limit, as long as the model's context allows.
            options = {"max_tokens": None, **inputs.default_options, **body.sampling_params}
            params = make_params(options)
            if body.stream:
                _check_stream(params)
            kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
            params = dataclasses.replace(params, output_kind=kind)
            prompts = inputs.parse(
                {"prompt_token_ids": body.token_ids, "cache_salt": body.cache_salt}
            )
            return Asked(prompts=prompts, params=params)

        batch, asked = await server.start(caller, read, priority=body.priority, adapter=adapter)
        head = {
            "request_id": caller.id,
            "created": int(time.time()),
            "model": server.name_of(adapter),
        }
        return cls(server, body, head, batch, asked.params)

    def __init__(
        self,
        server: Server,
        body: GenerateRequest,
        head: dict[str, Any],
        batch: Batch,
        params: SamplingParams,
    ):
        self.batch = batch
        self._server = server
        self._body = body
        self._head = head
        self._params = params

    def close(self) -> None:
        """See `Call`."""
        self.batch.close()

    async def response(self) -> dict[str, Any]:
        """The complete answer."""
        (output,) = await self.batch.last_outputs()
        usage = self._server.usage()
        usage.add(0, output)
        return {
            **self._head,
            "choices": [self._choice(completion) for completion in output.outputs],
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
            "prompt_token_id_logprobs": token_id_logprobs(output.prompt_token_id_logprobs),
            "kv_transfer_params": None,
            "usage": usage.body(),
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks."""
        usage, head = self._server.usage(), {"request_id": self._head["request_id"]}
        with_usage, always = self._server.wanted_usage(self._body.stream_options)
        async for _, output in self.batch.outputs():
            usage.add(0, output)
            for completion in output.outputs:
                chunk = {**head, "choices": [self._choice(completion)]}
                if always:
                    chunk["usage"] = usage.chunk_body(0, completion.index)
                yield chunk
        if with_usage:
            yield {**head, "choices": [], "usage": usage.body()}

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if completion.logprobs is not None:
            best = self._params.logprobs
            best = -1 if best is None else best
            logprobs = generate_logprobs(completion.token_ids, completion.logprobs, best)
        return {
            "index": completion.index,
            "token_ids": list(completion.token_ids),
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "weight_versions": completion.weight_versions,
        }


def _check_stream(params: SamplingParams) -> None:
    """Raise ValueError for what only whole answers have."""
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        if getattr(params, name) is not None:
            raise ValueError(f"{name} are not available with stream=true; leave one of them out")
