"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.server.protocol.lists import ListOf
from jaxpage.server.protocol.sampling import (
    OpenModel,
    SamplingRequest,
    check_max_tokens,
    make_params,
)

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Function(OpenModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self) -> dict[str, Any]:
        """The tool that chat templates get: vLLM's keys, in its order, as many templates write them all as JSON."""
        names = ["name", "description", "parameters"]
        if self.strict is not None:
            names.append("strict")
        return {"type": "function", "function": {name: getattr(self, name) for name in names}}


class Tool(OpenModel):
    type: Literal["function"] = "function"
    function: Function


class TemplateFields(OpenModel):
    """Options of the chat template."""

    messages: ListOf[dict[str, Any]] = Field(min_length=1)
    tools: ListOf[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: ListOf[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None

    @property
    def tool_list(self) -> list[dict[str, Any]] | None:
        """The tools in OpenAI's format, with nothing else."""
        return None if self.tools is None else [tool.function.to_tool() for tool in self.tools]

    def template_options(
        self, *, trust_template: bool, defaults: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Options of `InputProcessor.parse_chat`. Raises ValueError."""
        if self.chat_template is not None and not trust_template:
            raise ValueError(
                "chat_template of a request is not used; start the server with --trust-request-chat-template"
            )
        kwargs = dict(defaults or {}) | dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            kwargs["documents"] = self.documents
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
            if "enable_thinking" not in (self.chat_template_kwargs or {}):
                kwargs["enable_thinking"] = self.reasoning_effort != "none"
        return {
            "chat_template": self.chat_template,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": kwargs,
            "tokenization_kwargs": {"add_special_tokens": self.add_special_tokens},
        }


class ChatRequest(SamplingRequest, TemplateFields):
    """OpenAI's chat request, with vLLM's extras."""

    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    echo: bool = False
    include_reasoning: bool = True

    def template_options(self, **options: Any) -> dict[str, Any]:
        """See `TemplateFields`. Raises ValueError."""
        found = super().template_options(**options)
        found["tokenization_kwargs"] |= self.truncation()
        return found

    def choice(self) -> Any:
        """`tool_choice` with its default. Raises ValueError."""
        if self.tools == []:
            raise ValueError("tools must not be empty; leave it out, or give a tool")
        choice = self.tool_choice
        if choice is None:
            return "auto" if self.tools else "none"
        if isinstance(choice, str) and choice not in ("auto", "none", "required"):
            raise ValueError(
                f'tool_choice must be "auto", "none", "required" or name a function, got {choice!r}'
            )
        if choice != "none" and not self.tools:
            raise ValueError(f"tool_choice={choice!r} needs tools")
        return choice

    def _tool_wins(self) -> bool:
        """Whether calls that must be made replace other constraints; a named one replaces only a format, as in vLLM."""
        return self.tool_choice == "required" or (
            isinstance(self.tool_choice, dict) and self.structured_outputs is None
        )

    def check_max_tokens(self, max_model_len: int) -> None:
        """Raise ValueError for more tokens than a sequence may have."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        check_max_tokens(name, getattr(self, name), max_model_len)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling params, apart from tools. Raises ValueError."""
        options = self.sampling_options(defaults)
        given = self.max_completion_tokens
        max_tokens = self.max_tokens if given is None else given
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        else:
            options.setdefault("max_tokens", None)  # the remaining length of the sequence
        if self.top_logprobs is not None and not self.logprobs and self.top_logprobs != 0:
            raise ValueError("top_logprobs needs logprobs=true")
        options |= self.options_of_logprobs((self.top_logprobs or 0) if self.logprobs else None)
        if self._tool_wins():
            options.pop("structured_outputs", None)
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return make_params({**options, "output_kind": kind})
