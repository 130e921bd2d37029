"""`POST /v1/chat/completions`: answers in conversations."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from jaxpage.chat_template import text_of
from jaxpage.input_processor import InputProcessor
from jaxpage.outputs import CompletionOutput
from jaxpage.prompts import Prompt
from jaxpage.reasoning_parsers import OutputParser
from jaxpage.server.batch import Asked, Batch, Caller
from jaxpage.server.context import Head, Server
from jaxpage.server.logprobs import chat_logprobs, prompt_logprobs
from jaxpage.server.protocol.chat import ChatRequest
from jaxpage.server.texts import check_messages
from jaxpage.tool_parsers import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    without_parallel_calls,
)

# Null in whole answers that have nothing else there, as in vLLM.
_NULL_FIELDS = ("prompt_logprobs", "prompt_token_ids", "prompt_text")


@dataclass(frozen=True, kw_only=True)
class Rendered(Asked):
    """A conversation, ready for the engine."""

    parsers: list[OutputParser]  # one per answer
    choice: Any  # of tools


def render(server: Server, body: ChatRequest, inputs: InputProcessor) -> Rendered:
    """In the input thread. Raises ValueError."""
    choice, tools = body.choice(), body.tool_list
    body.check_max_tokens(inputs.limits.max_model_len)
    chat_format = inputs.chat_format(body.chat_template)
    params = chat_format.params(body.params(inputs.default_options), tools, choice)
    server.check_size(1, params)
    prompt = prompt_of(server, body, inputs)
    prompt.cache_salt = body.cache_salt
    parsers = [chat_format.parser(tools, choice, prompt.text) for _ in range(params.n)]
    return Rendered(prompts=[prompt], params=params, parsers=parsers, choice=choice)


def prompt_of(server: Server, body: ChatRequest, inputs: InputProcessor) -> Prompt:
    """The conversation as the chat template renders it. In the input thread. Raises ValueError."""
    if body.truncate_prompt_tokens is None:
        check_messages(body.messages, inputs)
    options = body.template_options(
        trust_template=server.options.trust_request_chat_template,
        defaults=server.options.default_chat_template_kwargs,
    )
    hides_tools = body.choice() == "none" and server.options.exclude_tools_when_tool_choice_none
    tools = None if hides_tools else body.tool_list
    (prompt,) = inputs.parse_chat(body.messages, tools=tools, **options)
    return prompt


class ChatCall:
    """A running call. It must be closed."""

    @classmethod
    async def start(cls, server: Server, body: ChatRequest, caller: Caller) -> ChatCall:
        """Raises ValueError, ApiError or EngineDeadError before anything is computed."""
        body.warn_of_unknown()
        adapter = server.check_model(body.model)
        body = await server.with_media(body)
        batch, rendered = await server.start(
            caller,
            lambda inputs: render(server, body, inputs),
            priority=body.priority,
            adapter=adapter,
        )
        return cls(server, body, caller.id, batch, rendered)

    def __init__(
        self, server: Server, body: ChatRequest, call_id: str, batch: Batch, rendered: Rendered
    ):
        self.batch = batch
        self._server = server
        self._body = body
        self._rendered = rendered
        self._id = f"chatcmpl-{call_id}"
        self._created = int(time.time())
        self._model = server.name_of(server.adapters.get(body.model))
        self._turns = {i: Turn(parser) for i, parser in enumerate(rendered.parsers)}

    def close(self) -> None:
        """See `Call`."""
        self.batch.close()

    def _head(self, kind: str) -> Head:
        return Head(id=self._id, object=kind, created=self._created, model=self._model)

    async def response(self) -> dict[str, Any]:
        """The complete answer."""
        (output,) = await self.batch.last_outputs()
        usage = self._server.usage()
        usage.add(0, output)
        rest: dict[str, Any] = {"usage": usage.whole_body(), **dict.fromkeys(_NULL_FIELDS)}
        if self._body.prompt_logprobs is not None:
            rest["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            rest["prompt_token_ids"] = list(output.prompt_token_ids)
        choices = [self._whole_choice(completion) for completion in output.outputs]
        return self._head("chat.completion").whole_body(choices=choices, **rest)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks."""
        usage = self._server.usage()
        with_usage, always = self._server.wanted_usage(self._body.stream_options)
        head = self._head("chat.completion.chunk")

        def chunk(choice: dict[str, Any], **rest: Any) -> dict[str, Any]:
            if always:
                rest["usage"] = usage.chunk_body(0, choice["index"])
            return head.body(choices=[choice], **rest)

        is_begun = False
        async for _, output in self.batch.outputs():
            if not is_begun:
                is_begun = True
                usage.add_prompt(0, output)
                ids = list(output.prompt_token_ids) if self._body.return_token_ids else None
                for choice in self._first_choices():
                    yield chunk(choice, prompt_token_ids=ids, prompt_text=None)
            usage.add(0, output)
            for completion in output.outputs:
                choice = self._next_choice(completion)
                if choice is not None:
                    yield chunk(choice)
        if with_usage:
            yield head.body(choices=[], usage=usage.body())

    @property
    def _role(self) -> str:
        """Without a generation prompt the answer continues the last message."""
        return "assistant" if self._body.add_generation_prompt else self._body.messages[-1]["role"]

    def _echo(self) -> str:
        """The text of a last message that has the answer's role, with `echo`."""
        last = self._body.messages[-1]
        if not self._body.echo or last["role"] != self._role:
            return ""
        return text_of(last)

    def _first_choices(self) -> list[dict[str, Any]]:
        delta = {"role": self._role, "content": self._echo()}
        return [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            for i in self._turns
        ]

    def _next_choice(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """The new part of a choice; None if it is held back."""
        turn = self._turns[completion.index]
        deltas = turn.parser.feed(completion.text)
        if completion.finish_reason is not None:
            deltas = [*deltas, *turn.parser.finish()]
        delta = turn.delta(self._wanted(deltas))
        logprobs = self._logprobs(completion)
        if not (delta or logprobs or completion.finish_reason or self._body.return_token_ids):
            return None
        choice: dict[str, Any] = {
            "index": completion.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(completion, turn),
            "token_ids": self._token_ids(completion),
        }
        if completion.finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        return choice

    def _whole_choice(self, completion: CompletionOutput) -> dict[str, Any]:
        turn = self._turns[completion.index]
        turn.delta(self._wanted([*turn.parser.feed(completion.text), *turn.parser.finish()]))
        message: dict[str, Any] = {"role": self._role, **turn.message(self._echo())}
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": self._finish_reason(completion, turn),
            "stop_reason": completion.stop_reason,
            "token_ids": self._token_ids(completion),
            "routed_experts": None,
        }
        return choice

    def _token_ids(self, completion: CompletionOutput) -> list[int] | None:
        return list(completion.token_ids) if self._body.return_token_ids else None

    def _wanted(self, deltas: list[Delta]) -> list[Delta]:
        """Only the deltas that the client requested."""
        if self._body.parallel_tool_calls is False:
            deltas = without_parallel_calls(deltas)
        if not self._body.include_reasoning:
            deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
        return deltas

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(
            completion.token_ids,
            completion.logprobs or (),
            -1 if self._body.logprob_token_ids else self._body.top_logprobs or 0,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )

    def _finish_reason(self, completion: CompletionOutput, turn: Turn) -> str | None:
        """OpenAI reports "stop" if the client named the tool."""
        is_named = isinstance(self._rendered.choice, dict)
        if completion.finish_reason == "stop" and turn.calls and not is_named:
            return "tool_calls"
        return completion.finish_reason


@dataclass
class Turn:
    """The state of one choice."""

    parser: OutputParser
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)  # in OpenAI's format

    def delta(self, deltas: list[Delta]) -> dict[str, Any]:
        """Add new deltas; returns them as OpenAI's delta."""
        content = "".join(d.text for d in deltas if isinstance(d, TextDelta))
        reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
        calls = self._call_deltas(deltas)
        self.text.append(content)
        self.reasoning.append(reasoning)
        found = {"content": content, "reasoning": reasoning, "tool_calls": calls}
        return {name: value for name, value in found.items() if value}

    def message(self, echo: str = "") -> dict[str, Any]:
        """The whole choice as OpenAI's message."""
        text, reasoning = echo + "".join(self.text), "".join(self.reasoning)
        message: dict[str, Any] = {
            "content": text if text or not (self.calls or reasoning) else None,
            "reasoning": reasoning or None,
            **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
        }
        if self.calls:
            message["tool_calls"] = [
                {k: v for k, v in call.items() if k != "index"} for call in self.calls
            ]
        return message

    def _call_deltas(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """The deltas of calls, one per call: some clients read only the first of them."""
        found: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            match delta:
                case ToolCallStart(index, name):
                    call_id = f"call_{uuid.uuid4().hex[:24]}"
                    head = {"index": index, "id": call_id, "type": "function"}
                    self.calls.append({**head, "function": {"name": name, "arguments": ""}})
                    found[index] = {**head, "function": {"name": name, "arguments": ""}}
                case ToolCallArguments(index, text):
                    self.calls[index]["function"]["arguments"] += text
                    new = {"index": index, "function": {"arguments": ""}}
                    found.setdefault(index, new)["function"]["arguments"] += text
        return list(found.values())
