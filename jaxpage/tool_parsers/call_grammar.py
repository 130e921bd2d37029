"""Grammars of calls, in llguidance's Lark: what the formats have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.tool_parsers.tools import Tool

Literal = Callable[[str], str]  # quotes a text for use in a rule; "" for an empty text


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """How a format writes calls."""

    # Rules for a call of the tool, under the given name; names of further rules begin with it and "_".
    call: Callable[[Tool, str, Literal], list[str]]
    begin: str = ""
    between: str = ""
    end: str = ""

    def rules(self, tools: tuple[Tool, ...], literal: Literal, *, several: bool) -> list[str]:
        """A grammar for one call of any of `tools`, or for one or more."""
        more = f"({literal(self.between)} call)*" if several else ""
        start = (literal(self.begin), "call", more, literal(self.end))
        names = [f"call_{i}" for i in range(len(tools))]
        rules = [
            "%llguidance {}",  # marks it as Lark, not GBNF
            f"start: {' '.join(filter(None, start))}",
            f"call: {' | '.join(names)}",
        ]
        for name, tool in zip(names, tools, strict=True):
            rules += self.call(tool, name, literal)
        return rules


def json_call(before: str, after: str) -> Callable[[Tool, str, Literal], list[str]]:
    """A call with JSON arguments between two texts; `%s` in the first is the tool's name."""

    def rules(tool: Tool, rule: str, literal: Literal) -> list[str]:
        return [
            f"{rule}: {literal(before % tool.name)} {rule}_arguments {literal(after)}",
            json_rule(f"{rule}_arguments", tool.parameters),
        ]

    return rules


# As templates write it. With free whitespace a model could emit nothing else.
_AS_PYTHON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(rule: str, schema: Any) -> str:
    """JSON that matches the schema, formatted like Python's `json.dumps`."""
    fields = schema if isinstance(schema, Mapping) else {}
    return f"{rule}: %json {json.dumps({**fields, 'x-guidance': _AS_PYTHON})}"


def literal_with(special_tokens: Mapping[str, int]) -> Literal:
    """Quotes texts; markers that are special tokens must be generated as these tokens, not as other tokens' bytes."""
    cut = re.compile(f"({'|'.join(map(re.escape, special_tokens))})") if special_tokens else None

    def literal(text: str) -> str:
        parts = cut.split(text) if cut else [text]
        return " ".join(
            f"<[{special_tokens[part]}]>"
            if part in special_tokens
            else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    return literal
