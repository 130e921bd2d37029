"""Items of `/v1/responses`: messages, reasoning, calls and their outputs; and their conversion to chat messages.

Must not know requests or the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    model_validator,
)

from jaxpage.server.protocol.lists import ListOf

Status = Literal["in_progress", "completed", "incomplete"]

# Parts of an assistant's message in the order in which models write them, and which parts must not precede each.
_TURN = {
    "reasoning": ("reasoning", "content", "tool_calls"),
    "content": ("content", "tool_calls"),
    "tool_calls": (),
}


def new_id(prefix: str) -> str:
    """An item id: "msg", "rs", "fc" or "fco", and a unique part."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _encodable(text: str) -> str:
    text.encode()  # JSON allows lone surrogates, but they cannot be written back
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class _Object(BaseModel):
    """Ignores unknown and null fields: clients send whole outputs back."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class Part(_Object):
    """A text."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text = Field(validation_alias=AliasChoices("text", "refusal"))


class ImagePart(_Object):
    """A picture by its URL. Uploaded files are not supported."""

    type: Literal["input_image"]
    image_url: Text
    detail: Text = "auto"  # ignored: the model's processor determines the size


def _to_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Content = Annotated[
    ListOf[Part], BeforeValidator(_to_parts, json_schema_input_type=str | ListOf[Part])
]
SeenPart = Annotated[Part | ImagePart, Field(discriminator="type")]
SeenContent = Annotated[
    ListOf[SeenPart], BeforeValidator(_to_parts, json_schema_input_type=str | ListOf[SeenPart])
]


class Message(_Object):
    type: Literal["message"] = "message"
    id: Text = Field(default_factory=lambda: new_id("msg"))
    role: Literal["user", "assistant", "system", "developer"]
    content: SeenContent
    status: Status = "completed"

    @model_validator(mode="after")
    def _users_show(self) -> Message:
        if self.role != "user" and any(isinstance(part, ImagePart) for part in self.content):
            raise ValueError(f"input_image is for messages of role user, not {self.role}")
        return self

    @property
    def text(self) -> str:
        """Its texts, joined by line breaks."""
        return "\n".join(part.text for part in self.content if isinstance(part, Part))

    def body(self) -> dict[str, Any]:
        """The item in the API."""
        if self.role == "assistant":
            parts = [
                {"type": "output_text", "text": p.text, "annotations": []}
                for p in self.content
                if isinstance(p, Part)
            ]
        else:
            parts = [
                {"type": "input_text", "text": p.text} if isinstance(p, Part) else p.model_dump()
                for p in self.content
            ]
        return self.model_dump(exclude={"content"}) | {"content": parts}


class ReasoningPart(_Object):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class Reasoning(_Object):
    type: Literal["reasoning"]
    id: Text = Field(default_factory=lambda: new_id("rs"))
    content: list[ReasoningPart] = []
    summary: list[ReasoningPart] = []
    status: Status = "completed"

    @property
    def text(self) -> str:
        """The reasoning, or its summary if there is nothing else."""
        return "\n".join(part.text for part in self.content or self.summary)

    def body(self) -> dict[str, Any]:
        """The item in the API."""
        return self.model_dump()


class FunctionCall(_Object):
    type: Literal["function_call"]
    id: Text = Field(default_factory=lambda: new_id("fc"))
    call_id: Text
    name: Text
    arguments: Text  # JSON
    status: Status = "completed"

    def body(self) -> dict[str, Any]:
        """The item in the API."""
        return self.model_dump()


class FunctionCallOutput(_Object):
    type: Literal["function_call_output"]
    id: Text = Field(default_factory=lambda: new_id("fco"))
    call_id: Text
    output: Content
    status: Status = "completed"

    def body(self) -> dict[str, Any]:
        """The item in the API."""
        output = "\n".join(part.text for part in self.output)
        return self.model_dump(exclude={"output"}) | {"output": output}


def _kind(item: Any) -> str | None:
    """Messages may omit their type."""
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    kind = item.get("type") or "message"
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="must be of type message, reasoning, function_call or function_call_output",
    ),
]


def _to_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    ListOf[Item], BeforeValidator(_to_items, json_schema_input_type=str | ListOf[Item])
]
read_items = TypeAdapter(ListOf[Item]).validate_python


def to_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """A conversation for a chat template. Raises ValueError for the output of an unknown call.

    Consecutive reasoning, text and calls of the assistant become one message. Adjacent messages of the system and of
    developers are joined, since many templates allow only one of them; `chat_template` knows which roles they have.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # names of called functions, by call id
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case Message(role="assistant"):
                _turn(messages, "content")["content"] = _content(item.content)
            case Message(role="user"):
                messages.append({"role": "user", "content": _content(item.content)})
            case Message():
                _instruct(messages, item.role, item.text)
            case Reasoning():
                _turn(messages, "reasoning")["reasoning"] = item.text
            case FunctionCall():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _turn(messages, "tool_calls").setdefault("tool_calls", []).append(call)
                names[item.call_id] = item.name
            case FunctionCallOutput():
                if item.call_id not in names:
                    raise ValueError(
                        f"input has the output of call {item.call_id!r}, and no function_call of this id before it"
                    )
                message = {
                    "role": "tool",
                    "tool_call_id": item.call_id,
                    "name": names[item.call_id],
                }
                messages.append(message | {"content": _content(item.output)})
    return messages


def _turn(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """The assistant's message for a part: the last one, if the part can follow its contents, else a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in _TURN[part]):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _instruct(messages: list[dict[str, Any]], role: str, text: str) -> None:
    if messages and messages[-1]["role"] in ("system", "developer"):
        messages[-1]["content"] += f"\n\n{text}"
    else:
        messages.append({"role": role, "content": text})


def _content(parts: Sequence[Part | ImagePart]) -> str | list[dict[str, Any]]:
    if len(parts) == 1 and isinstance(parts[0], Part):
        return parts[0].text
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, Part)
        else {"type": "image_url", "image_url": {"url": part.image_url}}
        for part in parts
    ]
