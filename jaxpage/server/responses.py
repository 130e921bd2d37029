"""`POST /v1/responses`: chats with items as input and output, which may be stored and continued."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from jaxpage.input_processor import InputProcessor
from jaxpage.outputs import CompletionOutput
from jaxpage.sampling_params import SamplingParams
from jaxpage.server.batch import Batch, Caller
from jaxpage.server.chat import Rendered, render
from jaxpage.server.context import Server
from jaxpage.server.errors import ApiError, to_answer_error
from jaxpage.server.logprobs import chat_logprobs
from jaxpage.server.protocol.response_items import to_messages
from jaxpage.server.protocol.responses import ResponsesRequest
from jaxpage.server.response_output import Event, ResponseOutput
from jaxpage.server.response_store import StoredResponse

# By finish reason; others: "incomplete".
_STATUS = {"stop": "completed", "abort": "cancelled", "error": "failed"}
_CUT = {"reason": "max_output_tokens"}
_NOT_SERVED = {
    "conversation": "continue a stored response with previous_response_id",
    "prompt": "write what it says into instructions and input",
}


class ResponseCall:
    """A running call. It must be closed."""

    @classmethod
    async def start(cls, server: Server, body: ResponsesRequest, caller: Caller) -> ResponseCall:
        """Raises ValueError, ApiError or EngineDeadError before anything is computed."""
        _refuse(body)
        body.warn_of_unknown()
        adapter = server.check_model(body.model)
        items = (*server.responses.conversation(body.previous_response_id), *body.input)
        messages = to_messages(body.instructions, items)
        seen = await server.seen(messages, "input")

        def read(inputs: InputProcessor) -> Rendered:
            chat = body.to_chat(messages, inputs.limits.max_model_len)
            return render(server, chat.model_copy(update={"messages": seen}), inputs)

        repeated = body.repeated()
        batch, rendered = await server.start(caller, read, priority=body.priority, adapter=adapter)
        state = _begun(server.name_of(adapter), f"resp_{caller.id}", rendered.params, repeated)
        stored = None
        if body.store:
            stored = StoredResponse(items=items, response=state, request_ids=batch.request_ids)
            try:
                server.responses.add(stored)
            except ApiError:
                batch.close()
                raise
        output = ResponseOutput(
            rendered.parsers[0], parallel_calls=body.parallel_tool_calls is not False
        )
        return cls(server, body, batch, state, output, stored)

    def __init__(
        self,
        server: Server,
        body: ResponsesRequest,
        batch: Batch,
        state: dict[str, Any],
        output: ResponseOutput,
        stored: StoredResponse | None,
    ):
        """`state`: the current response."""
        self.batch = batch
        self._server = server
        self._body = body
        self._state = state
        self._output = output
        self._stored = stored
        self._usage = server.usage()

    async def response(self) -> dict[str, Any]:
        """The complete answer."""
        try:
            async for _ in self._events():
                pass
        except Exception as error:
            self._fail(error)
            raise
        return self._state

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as OpenAI's events. An error is the last of them."""
        numbers = itertools.count()

        def numbered(event: Event) -> dict[str, Any]:
            return {"type": event["type"], "sequence_number": next(numbers), **event}

        for name in ("response.created", "response.in_progress"):
            yield numbered({"type": name, "response": self._state})
        try:
            async for event in self._events():
                yield numbered(event)
        except Exception as error:  # the status was sent long ago
            self._fail(error)
        last = self._state["status"]
        last = "incomplete" if last == "cancelled" else last  # "cancelled" has no event of its own
        yield numbered({"type": f"response.{last}", "response": self._state})

    def close(self) -> None:
        """See `Call`."""
        self.batch.close()
        if self._state["status"] == "in_progress":
            self._end("cancelled")

    async def _events(self) -> AsyncIterator[Event]:
        """The events of items. After the last one the response is complete."""
        reason, detail = None, None
        async for _, output in self.batch.outputs():
            self._usage.add(0, output)
            for completion in output.outputs:
                reason, detail = completion.finish_reason, completion.stop_reason
                for event in self._output.feed(completion.text, self._logprobs(completion)):
                    yield event
        for event in self._output.finish(is_complete=reason == "stop"):
            yield event
        self._end(
            _STATUS.get(reason or "", "incomplete"),
            usage=self._usage.response_body(await self._num_reasoning_tokens()),
            incomplete_details=_CUT if reason == "length" else None,
            error=_error(str(detail)) if reason == "error" else None,
        )

    async def _num_reasoning_tokens(self) -> int:
        text = self._output.reasoning
        if not text:
            return 0
        return await self._server.with_inputs(lambda inputs: inputs.count_tokens(text))

    def _fail(self, error: Exception) -> None:
        self._end("failed", error=_error(to_answer_error(error).message))

    def _end(self, status: str, **changes: Any) -> None:
        if status == "completed":
            changes["completed_at"] = int(time.time())
        self._state = self._state | {"status": status, "output": self._output.items(), **changes}
        if self._stored is not None:
            self._server.responses.update(self._stored, self._state)

    def _logprobs(self, completion: CompletionOutput) -> list[Any]:
        """Logprobs of the tokens whose text is sent."""
        if not self._body.wants_logprobs:
            return []
        best = self._body.top_logprobs or 0
        found = chat_logprobs(completion.token_ids, completion.logprobs or (), best, as_ids=False)
        by_token = completion.finish_reason == "stop" and not isinstance(
            completion.stop_reason, str
        )
        return found["content"][: -1 if by_token else None]


def _error(message: str) -> dict[str, Any]:
    return {"code": "server_error", "message": message}


def _begun(
    model: str, response_id: str, params: SamplingParams, repeated: dict[str, Any]
) -> dict[str, Any]:
    """A response without output; `repeated` are the fields copied from its request."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "service_tier": "default",
        "temperature": params.temperature,
        "top_p": params.top_p,
        **repeated,
    }


def _refuse(body: ResponsesRequest) -> None:
    """Raise ApiError for unsupported fields that would change the answer."""
    for name, instead in _NOT_SERVED.items():
        if (body.model_extra or {}).get(name) is not None:
            raise ApiError(400, f"{name} is not served; {instead}", param=name)
