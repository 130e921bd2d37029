"""vLLM's `gemma4`: Gemma 4, whose templates write

    <|tool_call>call:f{a:<|"|>x<|"|>,b:[1,true],c:{d:null}}<tool_call|>

Keys are bare, and a string is what is between two delimiters, without escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.tool_parsers.call_grammar import CallGrammar
from jaxpage.tool_parsers.gemma4_grammar import BEGIN, END, QUOTE, call_rules
from jaxpage.tool_parsers.json_text import MAX_DEPTH
from jaxpage.tool_parsers.parser import Format
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.tagged import read_value
from jaxpage.tool_parsers.tools import ANY_TOOL, Tool
from jaxpage.tool_parsers.values import DEFINITIONS, known_types, resolved, to_json
from jaxpage.tool_parsers.writer import Writer

_MARKERS = Markers(BEGIN)
_STRING_ENDS = Markers(QUOTE, END)
_NAME = re.compile(r"[^{}()<>\n]*")
_KEY = re.compile(r"[^:,{}()\[\]<>\n]*")
_BETWEEN = re.compile(r"[ ,\t\r\n]*")
_CLOSERS = {"{": "}", "(": ")", "[": "]"}
# What is not in delimiters ends where the object or list goes on or ends.
_BARE = {closer: re.compile(rf"[^,<{re.escape('}]' + closer)}]*") for closer in _CLOSERS.values()}


@dataclass
class _Level:
    """An object or list that is being read."""

    closer: str
    schema: Any
    is_empty: bool = True

    @property
    def end(self) -> str:
        """What closes it in JSON."""
        return "]" if self.closer == "]" else "}"


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    """As in vLLM, "call" may be missing, parentheses may be around the arguments, and the end marker closes all."""
    by_name = {tool.name: tool for tool in tools}
    while (yield from read_until(source, _MARKERS, writer.text)):
        yield from source.run(SPACE)
        if (yield from source.match("call:", ":")):
            name = (yield from source.run(_NAME)).strip()
            opener = (yield from source.match("{", "(")) if name else ""
            if opener:
                writer.start(name)
                source.take_held()
                schema = by_name.get(name, ANY_TOOL).parameters
                if (yield from _read_arguments(source, writer, _Level(_CLOSERS[opener], schema))):
                    yield from source.run(SPACE)
                    if (yield from source.match(END)):
                        source.take_held()
        writer.text(source.take_held())


def _read_arguments(source: Source, writer: Writer, arguments: _Level) -> Reading[bool]:
    """Reads what follows the opening brace. False if it is invalid or cut off. Then the source holds what is text."""
    writer.arguments("{")
    levels = [arguments]
    while levels:
        level = levels[-1]
        source.hold()
        yield from source.run(_BETWEEN)
        marker = yield from source.match(level.closer, END)
        if marker == END:
            source.pos -= len(END)
            writer.arguments("".join(level.end for level in reversed(levels)))
            levels = []
        elif marker:
            writer.arguments(levels.pop().end)
        elif not (yield from _read_member(source, writer, levels)):
            return False
    source.hold()
    return True


def _read_member(source: Source, writer: Writer, levels: list[_Level]) -> Reading[bool]:
    """Reads a key and its value, or a value of a list. The value may be a level of its own, which is only begun."""
    level = levels[-1]
    before = "" if level.is_empty else ", "
    key = None
    if level.closer != "]":
        key = yield from _read_key(source)
        if not key:
            return False
        before += f"{json.dumps(key, ensure_ascii=False)}: "
    schema = _inner_schema(level.schema, key)
    level.is_empty = False
    opener = yield from source.match("{", "[", QUOTE)
    if opener == QUOTE:
        types = known_types(schema) or ("string",)
        end = yield from read_value(source, writer, before, _STRING_ENDS, types)
        if end == END:
            source.pos -= len(END)
        return bool(end)
    if opener:
        if len(levels) == MAX_DEPTH:
            return False
        source.take_held()
        writer.arguments(before + opener)
        levels.append(_Level(_CLOSERS[opener], schema))
        return True
    text = yield from source.run(_BARE[level.closer])
    if not text or not (yield from source.more()):
        return False
    source.take_held()
    writer.arguments(before + to_json(text.strip(), known_types(schema)))
    return True


def _read_key(source: Source) -> Reading[str]:
    """A key and its colon; "" if there is none. The key may be in delimiters."""
    is_quoted = yield from source.match(QUOTE)
    key = (yield from source.run(_KEY)).strip()
    if is_quoted and not (yield from source.match(QUOTE)):
        return ""
    yield from source.run(SPACE)
    if not (yield from source.match(":")):
        return ""
    yield from source.run(SPACE)
    return key


def _inner_schema(schema: Any, key: str | None) -> Any:
    """The schema of an object's value, or of a list's (`key` is None); None if nothing is known of it."""
    outer = resolved(schema)
    shared = {k: outer[k] for k in DEFINITIONS if k in outer}
    options = [outer]
    for choice in ("anyOf", "oneOf", "allOf"):
        found = outer.get(choice)
        inner = found if isinstance(found, list) else []
        options += [resolved(shared | dict(o)) for o in inner if isinstance(o, Mapping)]
    for option in options:
        properties = option.get("properties")
        if key is None:
            inner = option.get("items")
        elif isinstance(properties, Mapping) and key in properties:
            inner = properties[key]
        else:
            inner = option.get("additionalProperties")
        if isinstance(inner, Mapping):
            return shared | dict(inner)
    return None


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    return CallGrammar(call=call_rules)


FORMAT = Format(read=read, grammar=grammar, markers=(BEGIN, END, QUOTE), keeps_special_tokens=True)
