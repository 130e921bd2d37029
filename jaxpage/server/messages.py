"""`POST /v1/messages`: chats in the format of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from jaxpage.input_processor import InputProcessor
from jaxpage.outputs import CompletionOutput
from jaxpage.reasoning import has_markers
from jaxpage.server.batch import Batch, Caller
from jaxpage.server.chat import prompt_of, render
from jaxpage.server.context import Server
from jaxpage.server.error_response import anthropic_body
from jaxpage.server.errors import ApiError, to_answer_error
from jaxpage.server.message_output import Event, MessageOutput
from jaxpage.server.protocol.chat import ChatRequest
from jaxpage.server.protocol.messages import CountTokensRequest, MessagesRequest

_FAILED = {
    "abort": "the request was aborted",
    "error": "the output could not be constrained as requested",
}


async def count_tokens(server: Server, body: CountTokensRequest) -> dict[str, Any]:
    """The length of a prompt. Raises ValueError or ApiError."""
    body.warn_of_unknown()
    server.check_model(body.model)
    chat = await _with_pictures(server, body.to_chat())

    def count(inputs: InputProcessor) -> int:
        return len(prompt_of(server, chat, inputs).token_ids)

    return {"input_tokens": await server.with_inputs(count)}


class MessageCall:
    """A running call. It must be closed."""

    @classmethod
    async def start(cls, server: Server, body: MessagesRequest, caller: Caller) -> MessageCall:
        """Raises ValueError, ApiError or EngineDeadError before anything is computed."""
        body.warn_of_unknown()
        adapter = server.check_model(body.model)
        limits_thinking = has_markers(server.llm.config.reasoning_config)
        chat = await _with_pictures(server, body.to_chat(limits_thinking=limits_thinking))
        batch, rendered = await server.start(
            caller,
            lambda inputs: render(server, chat, inputs),
            priority=body.priority,
            adapter=adapter,
        )
        output = MessageOutput(
            rendered.parsers[0],
            parallel_calls=chat.parallel_tool_calls is not False,
            shows_thinking=body.shows_thinking,
        )
        head = _head(f"msg_{caller.id}", server.name_of(adapter))
        return cls(server, body, caller.id, batch, output, head)

    def __init__(
        self,
        server: Server,
        body: MessagesRequest,
        call_id: str,
        batch: Batch,
        output: MessageOutput,
        head: dict[str, Any],
    ):
        """`head`: the message while it has no content."""
        self.batch = batch
        self._body = body
        self._call_id = call_id
        self._output = output
        self._head = head
        self._usage = server.usage()

    async def response(self) -> dict[str, Any]:
        """The complete answer."""
        end: dict[str, Any] = {}
        async for event in self._events():
            if event["type"] == "message_delta":
                end = event["delta"]
        return self._message() | {"content": self._output.content(), **end}

    async def chunks(self) -> AsyncIterator[Event]:
        """The answer as Anthropic's events. An error is the last of them."""
        try:
            async for event in self._events():
                yield event
        except Exception as error:  # the status was sent long ago
            yield anthropic_body(to_answer_error(error), self._call_id)

    def close(self) -> None:
        """See `Call`."""
        self.batch.close()

    async def _events(self) -> AsyncIterator[Event]:
        is_begun, last = False, None
        async for _, output in self.batch.outputs():
            if not is_begun:
                is_begun = True
                self._usage.add_prompt(0, output)
                yield {"type": "message_start", "message": self._message()}
            self._usage.add(0, output)
            for last in output.outputs:
                for event in self._output.feed(last.text):
                    yield event
        assert last is not None
        for event in self._output.finish():
            yield event
        end = self._end(last)
        yield {"type": "message_delta", "delta": end, "usage": self._usage.message_body()}
        yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        return self._head | {"usage": self._usage.message_body()}

    def _end(self, last: CompletionOutput) -> dict[str, Any]:
        """Why the output ended. Raises ApiError if Anthropic has no reason for it."""
        reason, detail = last.finish_reason or "", last.stop_reason
        if reason in _FAILED:
            raise ApiError(500, f"{_FAILED[reason]}: {detail}" if detail else _FAILED[reason])
        stopped_by = detail if reason == "stop" and isinstance(detail, str) else None
        if stopped_by is not None:
            reason = "stop_sequence"
        elif reason == "length":
            is_full = self._usage.completion_tokens < self._body.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        else:
            reason = "tool_use" if self._output.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stopped_by}


async def _with_pictures(server: Server, chat: ChatRequest) -> ChatRequest:
    return chat.model_copy(update={"messages": await server.seen(chat.messages, "messages")})


def _head(message_id: str, model: str) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
