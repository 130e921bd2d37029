"""The output of a response: reasoning, messages and calls in sequence, and their events.

Knows deltas of parsers. Must not know requests or the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxpage.reasoning_parsers import OutputParser
from jaxpage.server.protocol.response_items import Status, new_id
from jaxpage.tool_parsers import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    without_parallel_calls,
)

Event = dict[str, Any]  # OpenAI's, without its "sequence_number"


class ResponseOutput:
    """The output so far. Its last item may continue."""

    def __init__(self, parser: OutputParser, *, parallel_calls: bool = True):
        self._parser = parser
        self._parallel_calls = parallel_calls
        self._items: list[TextItem | CallItem] = []
        self._logprobs: list[Any] = []  # of tokens whose text was not sent yet

    def items(self) -> list[dict[str, Any]]:
        """The items in the API, as they are once the output has ended for any reason."""
        bodies = [item.body() for item in self._items]
        if bodies and bodies[-1]["status"] == "in_progress":
            bodies[-1]["status"] = "incomplete"
        return bodies

    @property
    def reasoning(self) -> str:
        """The complete reasoning text."""
        return "".join(item.text for item in self._items if item.kind == "reasoning")

    def feed(self, text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Add text of the answer, with OpenAI's logprobs of its tokens if requested.

        A message gets those of all tokens after the items before it, including their end markers.
        """
        self._logprobs += logprobs
        yield from self._take(self._parser.feed(text))

    def finish(self, *, is_complete: bool) -> Iterator[Event]:
        """The output has ended. `is_complete`: it was not cut off."""
        yield from self._take(self._parser.finish())
        if not self._items:  # clients that expect a text get an empty one
            yield from self._open("message")
        if self._logprobs and self._items[-1].kind == "message":
            # The last tokens had no text, such as special ones. Whether they came with others is chance.
            yield self._items[-1].add("", self._logprobs)
        yield from self._end("completed" if is_complete else "incomplete")

    def _take(self, deltas: list[Delta]) -> Iterator[Event]:
        if not self._parallel_calls:
            deltas = without_parallel_calls(deltas)
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    if text:  # without a parser it may be empty
                        yield from self._open("message")
                        yield self._items[-1].add(text, self._logprobs)
                        self._logprobs = []
                case ReasoningDelta(text):
                    yield from self._open("reasoning")
                    yield self._items[-1].add(text)
                case ToolCallStart(_, name):
                    yield from self._begin(CallItem(len(self._items), name))
                case ToolCallArguments(_, text):
                    yield self._items[-1].add(text)
        if deltas and self._items and self._items[-1].kind != "message":
            self._logprobs = []

    def _open(self, kind: Literal["message", "reasoning"]) -> Iterator[Event]:
        """Make sure that the last item is of this kind."""
        if not self._items or self._items[-1].kind != kind:
            yield from self._begin(TextItem(len(self._items), kind))

    def _begin(self, item: TextItem | CallItem) -> Iterator[Event]:
        yield from self._end("completed")
        self._items.append(item)
        yield from item.added()

    def _end(self, status: Status) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].done(status)


class TextItem:
    """A message or reasoning with one part, a text."""

    def __init__(self, index: int, kind: Literal["message", "reasoning"]):
        self.kind = kind
        self._is_message = kind == "message"
        self._part_type = "output_text" if self._is_message else "reasoning_text"
        self._index = index
        self._id = new_id("msg" if self._is_message else "rs")
        self._status: Status = "in_progress"
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def body(self) -> dict[str, Any]:
        """The item in the API."""
        body = {
            "id": self._id,
            "type": self.kind,
            "status": self._status,
            "content": [self._part()],
        }
        return body | ({"role": "assistant"} if self._is_message else {"summary": []})

    def added(self) -> list[Event]:
        """The events of its start."""
        item = self.body() | {"content": []}
        return [
            {"type": "response.output_item.added", "output_index": self._index, "item": item},
            self._event("response.content_part.added", part=self._part()),
        ]

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> Event:
        """The event of more text."""
        self._pieces.append(text)
        self._logprobs += logprobs
        return self._event(
            f"response.{self._part_type}.delta", delta=text, **self._scores(logprobs)
        )

    def done(self, status: Status) -> list[Event]:
        """The events of its end."""
        self._status = status
        rest = {"text": self.text, **self._scores(self._logprobs)}
        return [
            self._event(f"response.{self._part_type}.done", **rest),
            self._event("response.content_part.done", part=self._part()),
            {"type": "response.output_item.done", "output_index": self._index, "item": self.body()},
        ]

    def _part(self) -> dict[str, Any]:
        part = {"type": self._part_type, "text": self.text, **self._scores(self._logprobs)}
        return part | ({"annotations": []} if self._is_message else {})

    def _scores(self, logprobs: Sequence[Any]) -> dict[str, Any]:
        return {"logprobs": list(logprobs)} if self._is_message else {}

    def _event(self, event: str, **rest: Any) -> Event:
        place = {"item_id": self._id, "output_index": self._index, "content_index": 0}
        return {"type": event, **place, **rest}


class CallItem:
    """A function call. Its text is its arguments."""

    kind = "function_call"

    def __init__(self, index: int, name: str):
        self._index = index
        self._name = name
        self._id = new_id("fc")
        self._call_id = new_id("call")
        self._status: Status = "in_progress"
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def body(self) -> dict[str, Any]:
        """The item in the API."""
        return {
            "id": self._id,
            "type": self.kind,
            "status": self._status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }

    def added(self) -> list[Event]:
        """The events of its start."""
        return [
            {"type": "response.output_item.added", "output_index": self._index, "item": self.body()}
        ]

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> Event:
        """The event of more text."""
        self._pieces.append(text)
        return self._event("response.function_call_arguments.delta", delta=text)

    def done(self, status: Status) -> list[Event]:
        """The events of its end."""
        self._status = status
        rest = {"name": self._name, "arguments": self.text}
        return [
            self._event("response.function_call_arguments.done", **rest),
            {"type": "response.output_item.done", "output_index": self._index, "item": self.body()},
        ]

    def _event(self, event: str, **rest: Any) -> Event:
        return {"type": event, "item_id": self._id, "output_index": self._index, **rest}
