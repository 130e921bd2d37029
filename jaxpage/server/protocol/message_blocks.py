"""Messages of `/v1/messages`, whose content is blocks, and their conversion to chat messages.

Must not know requests or the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jaxpage.server.protocol.lists import ListOf


class _Object(BaseModel):
    """Ignores other fields, such as `cache_control`."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Object):
    type: Literal["text"]
    text: str


class DataSource(_Object):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def address(self) -> str:
        """As a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(_Object):
    type: Literal["url"]
    url: str

    @property
    def address(self) -> str:
        return self.url


class ImageBlock(_Object):
    type: Literal["image"]
    source: Annotated[DataSource | UrlSource, Field(discriminator="type")]


class ToolReference(_Object):
    """A tool that a search has found. The model sees every tool from the beginning, so the name is enough."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolUse(_Object):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class Thinking(_Object):
    type: Literal["thinking"]
    thinking: str  # its signature is not checked


class RedactedThinking(_Object):
    """Reasoning that only Anthropic can read. It is left out."""

    type: Literal["redacted_thinking"]


def _to_blocks(content: Any) -> Any:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_ResultBlock = Annotated[TextBlock | ImageBlock | ToolReference, Field(discriminator="type")]
_ResultBlocks = Annotated[
    ListOf[_ResultBlock],
    BeforeValidator(_to_blocks, json_schema_input_type=str | ListOf[_ResultBlock] | None),
]


class ToolResult(_Object):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _ResultBlocks = []
    is_error: bool | None = False

    @property
    def text(self) -> str:
        """What the model reads. Chat templates have no place for `is_error`, so the text must say it."""
        lines = [
            block.text if isinstance(block, TextBlock) else block.tool_name
            for block in self.content
            if not isinstance(block, ImageBlock)
        ]
        text = "\n".join(line for line in lines if line)
        return f"Error: {text}" if self.is_error and "error" not in text.lower() else text


_UserBlock = Annotated[TextBlock | ImageBlock | ToolResult, Field(discriminator="type")]
_UserBlocks = Annotated[
    ListOf[_UserBlock], BeforeValidator(_to_blocks, json_schema_input_type=str | ListOf[_UserBlock])
]
_AssistantBlock = Annotated[
    TextBlock | Thinking | RedactedThinking | ToolUse, Field(discriminator="type")
]
_AssistantBlocks = Annotated[
    ListOf[_AssistantBlock],
    BeforeValidator(_to_blocks, json_schema_input_type=str | ListOf[_AssistantBlock]),
]
SystemBlocks = Annotated[
    ListOf[TextBlock], BeforeValidator(_to_blocks, json_schema_input_type=str | ListOf[TextBlock])
]


class UserMessage(_Object):
    # The last two are Claude Code's own names of the same role, as in vLLM.
    role: Literal["user", "ctx", "msg"]
    content: _UserBlocks


class AssistantMessage(_Object):
    role: Literal["assistant"]
    content: _AssistantBlocks


class SystemMessage(_Object):
    role: Literal["system"]
    content: SystemBlocks


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def is_billing(text: object) -> bool:
    """Whether it is the text with which Claude Code begins its system prompt.

    It differs in every request. With it no prompt would have a prefix in the cache, so it is left out, as in vLLM.
    """
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header")


def to_messages(system: Sequence[TextBlock], messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation for a chat template. Raises ValueError for the result of an unknown call.

    Consecutive messages of one role become one turn, as in Anthropic's API. Messages of the system at the beginning
    join the system prompt. Later ones join the turn of the user next to them: many templates know only one system
    message, and if that changed with each turn, no prompt would begin with the previous one.
    """
    rest = list(itertools.dropwhile(lambda message: message.role == "system", messages))
    first = _Parts()
    first.add_all(block for block in system if not is_billing(block.text))
    for message in messages[: len(messages) - len(rest)]:
        first.add_all(message.content)
    prompt = first.content()
    found = [{"role": "system", "content": prompt}] if prompt else []
    names: dict[str, str] = {}  # of called tools, by the id of the call
    for is_answer, turn in itertools.groupby(rest, lambda message: message.role == "assistant"):
        convert = _assistant_turn if is_answer else _user_turn
        found += convert(turn, names)
    return found


class _Parts:
    """The parts of a chat message."""

    def __init__(self):
        # Each is one part, or several texts that become one: joined at the end, as a copy of all before for each more
        # would take a minute for a long body.
        self._parts: list[list[dict[str, Any]]] = []

    @property
    def parts(self) -> list[dict[str, Any]]:
        """In OpenAI's format."""
        return [
            part[0] if len(part) == 1 else _text("\n\n".join(piece["text"] for piece in part))
            for part in self._parts
        ]

    def add_all(self, blocks: Iterable[Any]) -> bool:
        """Add the texts and pictures of one more message; whether it has any.

        Texts of different messages become one with a blank line between: many templates write parts without anything
        between them.
        """
        new = [part for block in blocks if (part := _part(block)) is not None]
        if not new:
            return False
        if self._parts and self._parts[-1][0]["type"] == new[0]["type"] == "text":
            self._parts[-1].append(new.pop(0))
        self._parts += [[part] for part in new]
        return True

    def content(self) -> str | list[dict[str, Any]]:
        """A text if that is all."""
        parts = self.parts
        if not parts:
            return ""
        return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(block: Any) -> dict[str, Any] | None:
    """OpenAI's part; None for an empty text, and for other blocks."""
    match block:
        case TextBlock(text=text) if text:
            return _text(text)
        case ImageBlock(source=source):
            return {"type": "image_url", "image_url": {"url": source.address}}
        case _:
            return None


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _assistant_turn(messages: Iterable[Any], names: dict[str, str]) -> list[dict[str, Any]]:
    said, thoughts, calls = _Parts(), [], []
    for message in messages:
        said.add_all(message.content)
        for block in message.content:
            match block:
                case Thinking(thinking=thought) if thought:
                    thoughts.append(thought)
                case ToolUse():
                    function = {"name": block.name, "arguments": block.input}
                    calls.append({"id": block.id, "type": "function", "function": function})
                    names[block.id] = block.name
    turn: dict[str, Any] = {"role": "assistant", "content": said.content()}
    if thoughts:
        turn["reasoning"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _user_turn(messages: Iterable[Any], names: dict[str, str]) -> list[dict[str, Any]]:
    """The results of tools, then what the user says. Pictures of results are the user's: templates expect tools to
    answer in text.
    """
    results: list[dict[str, Any]] = []
    said, is_users = _Parts(), False
    for message in messages:
        found = [block for block in message.content if isinstance(block, ToolResult)]
        results += [_result(block, names) for block in found]
        shown = [b for block in found for b in block.content if isinstance(b, ImageBlock)]
        has_said = said.add_all([*shown, *message.content])
        is_users |= has_said and message.role != "system"
    if results and not is_users:
        # A turn of the user after the results would make many templates drop the reasoning before them.
        texts = [results[-1]["content"], *(part["text"] for part in said.parts)]
        results[-1]["content"] = "\n\n".join(text for text in texts if text)
        return results
    return [*results, {"role": "user", "content": said.content()}]


def _result(block: ToolResult, names: dict[str, str]) -> dict[str, Any]:
    if block.tool_use_id not in names:
        raise ValueError(
            f"messages has a tool_result of {block.tool_use_id!r}, and no tool_use with this id before it"
        )
    about = {"tool_call_id": block.tool_use_id, "name": names[block.tool_use_id]}
    return {"role": "tool", **about, "content": block.text}
