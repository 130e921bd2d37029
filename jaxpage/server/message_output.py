"""The output of a message: thinking, text and tool calls as content blocks, and the events that announce them.

Knows deltas of parsers. Must not know requests or the engine.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json, to_json

from jaxpage.reasoning_parsers import OutputParser
from jaxpage.tool_parsers import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    without_parallel_calls,
)

Event = dict[str, Any]  # Anthropic's
Kind = Literal["thinking", "text", "tool_use"]

# The type and the field of a block's deltas.
_DELTAS: dict[Kind, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageOutput:
    """The blocks so far. The last one may continue."""

    def __init__(
        self, parser: OutputParser, *, parallel_calls: bool = True, shows_thinking: bool = True
    ):
        """Without `shows_thinking` there are blocks of thinking, but their text is empty."""
        self._parser = parser
        self._parallel_calls = parallel_calls
        self._shows_thinking = shows_thinking
        self._blocks: list[_Block] = []
        self._held: tuple[Kind, str] = ("text", "")  # white space that may begin a block

    def content(self) -> list[dict[str, Any]]:
        """The blocks in the API, as they are once the output has ended."""
        return [block.body() for block in self._blocks]

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "tool_use" for block in self._blocks)

    def feed(self, text: str) -> Iterator[Event]:
        """Add text of the answer."""
        yield from self._take(self._parser.feed(text))

    def finish(self) -> Iterator[Event]:
        """The output has ended."""
        yield from self._take(self._parser.finish())
        kind, space = self._held
        if space and kind == "text" and not self._blocks:  # it is the whole answer
            yield from self._begin("text")
            yield self._blocks[-1].add(space)
        yield from self._close()

    def _take(self, deltas: list[Delta]) -> Iterator[Event]:
        if not self._parallel_calls:
            deltas = without_parallel_calls(deltas)
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    yield from self._add("text", text)
                case ReasoningDelta(text):
                    yield from self._add("thinking", text)
                case ToolCallStart(_, name):
                    yield from self._begin("tool_use", name)
                case ToolCallArguments(_, text):
                    if text:
                        yield self._blocks[-1].add(text)

    def _add(self, kind: Kind, text: str) -> Iterator[Event]:
        """White space alone, as some models write between calls, is no block: Anthropic's API refuses such a one."""
        if not self._blocks or self._blocks[-1].kind != kind:
            before, space = self._held
            text = space + text if before == kind else text
            self._held = (kind, text)
            if not text.strip():
                return
            yield from self._begin(kind)
        if text and (kind == "text" or self._shows_thinking):
            yield self._blocks[-1].add(text)

    def _begin(self, kind: Kind, name: str = "") -> Iterator[Event]:
        yield from self._close()
        self._held = ("text", "")
        self._blocks.append(_Block(len(self._blocks), kind, name))
        yield self._blocks[-1].start()

    def _close(self) -> Iterator[Event]:
        if self._blocks:
            yield from self._blocks[-1].stop()


@dataclass
class _Block:
    index: int
    kind: Kind
    name: str  # of the tool
    id: str = field(default_factory=lambda: f"toolu_{uuid.uuid4().hex[:24]}")  # of the call
    pieces: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """The block in the API."""
        text = "".join(self.pieces)
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": _signature(text)}
            case "text":
                return {"type": "text", "text": text}
            case "tool_use":
                return {
                    "type": "tool_use",
                    "id": self.id,
                    "name": self.name,
                    "input": _arguments(text),
                }

    def start(self) -> Event:
        """The event of its start, where it is empty."""
        body = self.body() | ({"signature": ""} if self.kind == "thinking" else {})
        return {"type": "content_block_start", "index": self.index, "content_block": body}

    def add(self, text: str) -> Event:
        """The event of more text."""
        self.pieces.append(text)
        kind, name = _DELTAS[self.kind]
        return self._delta({"type": kind, name: text})

    def stop(self) -> Iterator[Event]:
        """The events of its end."""
        if self.kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self.body()["signature"]})
        yield {"type": "content_block_stop", "index": self.index}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


def _signature(thinking: str) -> str:
    """Clients expect one and send it back. Here it proves nothing, and is not checked."""
    return hashlib.sha256(thinking.encode(errors="replace")).hexdigest()


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. If they were cut off: what is complete of them, as clients of streams read them.

    Numbers too large for a float are None: the answer is JSON, which has no infinity.
    """
    try:
        found = from_json(text, allow_partial=True)
        found = from_json(to_json(found, inf_nan_mode="null"))
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}
