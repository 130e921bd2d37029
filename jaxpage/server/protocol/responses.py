"""`POST /v1/responses`: its request, and the conversion to a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from jaxpage.server.protocol.chat import ChatRequest, Function, ReasoningEffort, Tool
from jaxpage.server.protocol.lists import ListOf
from jaxpage.server.protocol.response_items import Items
from jaxpage.server.protocol.sampling import OpenModel, SamplingFields, check_max_tokens

_LOGPROBS = "message.output_text.logprobs"

# Fields that the response copies from the request.
_REPEATED = {
    "background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls",
    "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "store", "text",
    "tool_choice", "tools", "top_logprobs", "truncation", "user",
}  # fmt: skip


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunction(OpenModel):
    type: Literal["function"]
    name: str


class PlainFormat(OpenModel):
    type: Literal["text", "json_object"]


class SchemaFormat(OpenModel):
    type: Literal["json_schema"]
    name: str = "response"
    schema_: dict[str, Any] = Field(alias="schema")


class TextOptions(OpenModel):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] = PlainFormat(
        type="text"
    )


class ReasoningOptions(OpenModel):
    effort: ReasoningEffort | None = None  # for the chat template
    summary: str | None = None  # ignored: the full reasoning is returned


class ResponsesRequest(SamplingFields):
    """OpenAI's request for a response, with vLLM's extras."""

    input: Items = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None  # a stored response, whose conversation is continued
    # OpenAI's default is true. Here data of clients is stored only on request.
    store: bool | None = False
    background: bool | None = False
    # Without "reasoning.encrypted_content", since reasoning is not hidden; other values belong to OpenAI's tools.
    include: ListOf[str] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0)
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = "auto"
    parallel_tool_calls: bool | None = True
    max_tool_calls: int | None = None  # for tools run by the server; it runs none
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    # "auto": prompts that are too long are truncated on the left, as in vLLM.
    truncation: Literal["auto", "disabled"] | None = "disabled"
    metadata: (
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None
    ) = Field(None, max_length=16)
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def to_chat(self, messages: list[dict[str, Any]], max_model_len: int) -> ChatRequest:
        """The same request as a chat with these messages. Raises ValueError."""
        self._refuse()
        check_max_tokens("max_output_tokens", self.max_output_tokens, max_model_len)
        given = SamplingFields.model_fields.keys() & self.model_fields_set
        options = {name: getattr(self, name) for name in given}
        # Logprobs belong to items, which are separated as tokens arrive.
        options["stream"] = self.stream or self.wants_logprobs
        if self.truncation == "auto" and self.truncate_prompt_tokens is None:
            options["truncate_prompt_tokens"] = max(
                1, max_model_len - (self.max_output_tokens or 1)
            )
        goes_on = self._goes_on()
        return ChatRequest(
            **options,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            tools=[Tool(function=tool) for tool in self.tools] if self.tools else None,
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
        )

    def repeated(self) -> dict[str, Any]:
        """Fields of the response. Raises ValueError for values that JSON cannot represent."""
        try:
            found = from_json(self.model_dump_json(include=_REPEATED, by_alias=True))
        except ValueError as error:
            raise ValueError(f"the request has what no answer can repeat: {error}") from None
        defaults = {
            "background": False, "metadata": {}, "parallel_tool_calls": True, "text": TextOptions().model_dump(),
            "store": False, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "truncation": "disabled",
        }  # fmt: skip
        return found | {name: value for name, value in defaults.items() if found[name] is None}

    def _refuse(self) -> None:
        if self.background:
            raise ValueError(
                "background=true is not served; use stream=true, or wait for the answer"
            )
        if self.top_logprobs and not self.wants_logprobs:
            raise ValueError(f'top_logprobs needs include=["{_LOGPROBS}"]')

    def _goes_on(self) -> bool:
        """Whether the answer continues the last message, as in vLLM."""
        last = self.input[-1]
        return last.type == "message" and last.role == "assistant" and last.status != "completed"

    def _choice(self) -> Any:
        if isinstance(self.tool_choice, NamedFunction):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return None if self.tool_choice == "auto" else self.tool_choice

    def _response_format(self) -> dict[str, Any] | None:
        if self.text is None:
            return None
        if isinstance(self.text.format, SchemaFormat):
            return {"type": "json_schema", "json_schema": {"schema": self.text.format.schema_}}
        return {"type": self.text.format.type}
