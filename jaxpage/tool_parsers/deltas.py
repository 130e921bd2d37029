"""What a parser finds in an output: deltas, and their join.

Knows neither formats nor models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    index: int  # 0 for the first call of an output
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of the arguments' JSON text. The pieces of a call, joined, are its `arguments`."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON text of an object; its beginning, if the output was cut off

    @property
    def complete(self) -> bool:
        """Whether `arguments` is a whole object. False if the output ended, or became invalid, within it."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except ValueError:
            return False


@dataclass(frozen=True)
class ParsedOutput:
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def without_parallel_calls(deltas: Iterable[Delta]) -> list[Delta]:
    """Only the first call, for requests without parallel calls."""
    return [
        delta
        for delta in deltas
        if not isinstance(delta, ToolCallStart | ToolCallArguments) or delta.index == 0
    ]


def join(deltas: Iterable[Delta]) -> ParsedOutput:
    """Join all deltas of an output."""
    text: list[str] = []
    reasoning: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case TextDelta(piece):
                text.append(piece)
            case ReasoningDelta(piece):
                reasoning.append(piece)
            case ToolCallStart(_, name):
                names.append(name)
                arguments.append([])
            case ToolCallArguments(index, piece):
                arguments[index].append(piece)
    calls = (ToolCall(n, "".join(a)) for n, a in zip(names, arguments, strict=True))
    return ParsedOutput("".join(text), "".join(reasoning), tuple(calls))
