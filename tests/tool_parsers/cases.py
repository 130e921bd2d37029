"""Outputs and what they say, and the check that they say it however they are cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jaxpage.tool_parsers import Delta, ParsedOutput, ToolCall, ToolCallArguments, join


def tool(name: str, properties: dict[str, Any], **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool(
        "f",
        {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "on": {"type": "boolean"},
            "items": {"type": "array", "items": {"type": "integer"}},
            "where": {"$ref": "#/$defs/Place"},
            "unit": {"enum": ["C", "F"]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        **{
            "$defs": {
                "Place": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                }
            }
        },
    ),
    {"type": "function", "function": {"name": "g"}},
]


@dataclass(frozen=True)
class Case:
    name: str
    output: str
    expected: ParsedOutput

    def __str__(self) -> str:  # pytest's id
        return self.name.replace(" ", "-")


def case(name: str, output: str, text: str, *calls: tuple[str, str], reasoning: str = "") -> Case:
    """An output, the text in it, and its calls as names and arguments."""
    return Case(name, output, ParsedOutput(text, reasoning, tuple(ToolCall(*c) for c in calls)))


def read(parser: Any, pieces: Iterable[str]) -> list[Delta]:
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def cuts(output: str) -> Iterable[list[str]]:
    """Whole, in single characters, in two at every place, and at random."""
    yield [output]
    yield list(output)
    for at in range(1, len(output)):
        yield [output[:at], output[at:]]
    draw = random.Random(output)
    for _ in range(10):
        places = sorted(draw.randrange(len(output) + 1) for _ in range(draw.randrange(2, 12)))
        yield [output[a:b] for a, b in zip([0, *places], [*places, len(output)], strict=True)]


def check(make: Callable[[], Any], found: Case) -> None:
    for pieces in cuts(found.output):
        assert join(read(make(), pieces)) == found.expected, pieces


def first_pieces(parser: Any, output: str) -> dict[str, int]:
    """After how many characters the text, and the arguments of each call, began to come."""
    begun: dict[str, int] = {}
    for i, c in enumerate(output):
        for delta in parser.feed(c):
            key = type(delta).__name__
            if isinstance(delta, ToolCallArguments):
                key = f"arguments {delta.index}"
            begun.setdefault(key, i + 1)
    return begun
