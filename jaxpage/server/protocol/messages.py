"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's requests, and their conversion to a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxpage.server.protocol.chat import ChatRequest, Function, ReasoningEffort, Tool
from jaxpage.server.protocol.lists import ListOf
from jaxpage.server.protocol.message_blocks import Message, SystemBlocks, to_messages
from jaxpage.server.protocol.sampling import OpenModel, SamplingFields

_NOT_SERVED = {
    "container": "there is none; give tools that the client runs",
    "mcp_servers": "give their tools as tools that the client runs",
    "thread": "send the whole conversation in messages",
}
_CHOICES = {"auto": None, "any": "required", "none": "none"}


class ClientTool(OpenModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_the_client_s(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(
                f"tools of type {kind!r} are Anthropic's own, which are not served; give one with name and input_schema"
            )
        return data


class ToolChoice(OpenModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False

    @model_validator(mode="after")
    def _is_named(self) -> ToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError('type "tool" needs the name of the tool')
        return self

    @property
    def of_chat(self) -> Any:
        """OpenAI's `tool_choice`."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return _CHOICES[self.type]


class ThinkingConfig(OpenModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(OpenModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenModel):
    effort: ReasoningEffort | None = None  # for the chat template
    format: OutputFormat | None = None


class MessageFields(OpenModel):
    """What the prompt is made of."""

    model: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)]
    system: SystemBlocks = []
    tools: ListOf[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # as older clients write `output_config.format`
    chat_template_kwargs: dict[str, Any] | None = None
    # Every prefix is cached, and nothing is removed from a conversation: these have no effect.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    def chat_options(self) -> dict[str, Any]:
        """Fields of a chat with the same prompt. Raises ValueError."""
        self._refuse()
        messages = to_messages(self.system, self.messages)
        if not messages:
            raise ValueError("messages has no content; give a message of the user")
        config, choice = self.output_config or OutputConfig(), self.tool_choice
        goes_on = self._goes_on(messages)
        return {
            "model": self.model,
            "messages": messages,
            "tools": [Tool(function=_function(tool)) for tool in self.tools or ()] or None,
            "tool_choice": choice and choice.of_chat,
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "response_format": _response_format(config.format or self.output_format),
            "reasoning_effort": config.effort,
            "chat_template_kwargs": self._thinking() | (self.chat_template_kwargs or {}),
            "add_generation_prompt": not goes_on,
            "continue_final_message": goes_on,
        }

    def _refuse(self) -> None:
        """Raise ValueError for unsupported fields that would change the answer."""
        for name, instead in _NOT_SERVED.items():
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} is not served; {instead}")

    def _thinking(self) -> dict[str, Any]:
        """For the chat template, which otherwise decides."""
        return (
            {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        )

    def _goes_on(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the answer continues the last message. If that is empty, it is removed. Raises ValueError."""
        last = messages[-1]
        if last.get("role") != "assistant":
            return False
        if last.keys() == {"role", "content"} and not last["content"] and len(messages) > 1:
            messages.pop()
            return False
        if "tool_calls" in last or not last["content"]:
            raise ValueError(
                "messages must end with the user, or with a text of the assistant that the answer continues; a "
                "tool_use needs its tool_result"
            )
        return True


class CountTokensRequest(MessageFields):
    """How long a prompt is."""

    def to_chat(self) -> ChatRequest:
        """A chat with the same prompt. Raises ValueError."""
        return ChatRequest(**self.chat_options())


class MessagesRequest(MessageFields, SamplingFields):
    """Anthropic's request for a message, with vLLM's extras."""

    max_tokens: int = Field(ge=1)
    stop_sequences: ListOf[str] | None = None
    metadata: dict[str, Any] | None = None  # without effect
    service_tier: str | None = None  # without effect

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def to_chat(self, *, limits_thinking: bool) -> ChatRequest:
        """The same request as a chat. Raises ValueError.

        `limits_thinking`: whether the engine can apply `thinking.budget_tokens`.
        """
        given = SamplingFields.model_fields.keys() & self.model_fields_set
        options = {name: getattr(self, name) for name in given} | self.chat_options()
        if self.stop_sequences is not None:
            if self.stop is not None:
                raise ValueError("stop_sequences and stop mean the same; give one of them")
            options["stop"] = self.stop_sequences
        if limits_thinking and self.thinking is not None and self.thinking.type == "enabled":
            options.setdefault("thinking_token_budget", self.thinking.budget_tokens)
        return ChatRequest(**options, max_tokens=self.max_tokens)


def _function(tool: ClientTool) -> Function:
    return Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )


def _response_format(format: OutputFormat | None) -> dict[str, Any] | None:
    if format is None:
        return None
    return {"type": "json_schema", "json_schema": {"schema": format.schema_}}
