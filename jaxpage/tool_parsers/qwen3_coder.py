"""vLLM's `qwen3_coder`: Qwen3-Coder and Qwen3.5, whose templates specify

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

A value is plain text; its type is in the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial

from jaxpage.tool_parsers.call_grammar import CallGrammar
from jaxpage.tool_parsers.parser import Format
from jaxpage.tool_parsers.qwen3_coder_grammar import call_rules
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.values import schema_types, to_json
from jaxpage.tool_parsers.writer import Writer

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MARKERS = Markers(_BEGIN, _FUNCTION)
_NAME = re.compile(r"[^<>\n]*")
_ANY = Tool("", {})


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    """`<tool_call>` may be missing. So may closing tags, if what follows makes the end clear."""
    by_name = {tool.name: tool for tool in tools}
    while marker := (yield from read_until(source, _MARKERS, writer.text)):
        if marker == _BEGIN:
            yield from source.run(SPACE)
            marker = yield from source.match(_FUNCTION)
        if marker == _FUNCTION:
            name = (yield from source.run(_NAME)).strip()
            if name and (yield from source.match(">")):
                writer.start(name)
                yield from _read_parameters(source, writer, by_name.get(name, _ANY))
        writer.text(source.take_held())


def _read_parameters(source: Source, writer: Writer, tool: Tool) -> Reading[None]:
    """Everything after the function's name. Afterwards the source holds what is not part of the call."""
    writer.arguments("{")
    seen: set[str] = set()
    while True:
        source.hold()
        yield from source.run(SPACE)
        marker = yield from source.match(_PARAMETER, _FUNCTION_END, _END)
        if marker != _PARAMETER:
            break
        key = (yield from source.run(_NAME)).strip()
        if not (key and (yield from source.match(">"))):
            return
        before = f"{', ' if seen else ''}{json.dumps(key, ensure_ascii=False)}: "
        seen.add(key)
        types = schema_types(tool.schema(key))
        read_value = _read_text if types == ("string",) else partial(_read_other, types=types)
        end = yield from read_value(source, writer, before, _value_ends(tool, seen))
        source.take_held()
        if not end:
            return
        if end != _PARAMETER_END:
            source.pos -= len(end)
    if marker:
        writer.arguments("}")
        source.hold()
    if marker == _FUNCTION_END:
        yield from source.run(SPACE)
        if (yield from source.match(_END)):
            source.take_held()


def _value_ends(tool: Tool, seen: set[str]) -> Markers:
    """The markers that end a value: its closing tag or, without one, the start of the call's next part."""
    names = (name for name in tool.properties if _NAME.fullmatch(name) and name not in seen)
    unseen = [f"{_PARAMETER}{name}>" for name in names]
    return Markers(_PARAMETER_END, f"{_FUNCTION_END}\n{_END}", *unseen)


def _read_text(source: Source, writer: Writer, before: str, ends: Markers) -> Reading[str]:
    """Writes a string incrementally, after `before`. Returns the marker that ends it."""
    source.take_held()
    writer.arguments(before + '"')
    trimmed = _Trimmed(lambda text: writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
    end = yield from read_until(source, ends, trimmed.write)
    if end:
        writer.arguments('"')
    return end


def _read_other(
    source: Source, writer: Writer, before: str, ends: Markers, types: tuple[str, ...]
) -> Reading[str]:
    """A value that must be complete to be converted; text if it does not end. Returns the marker that ends it."""
    held = source.take_held()
    pieces: list[str] = []
    end = yield from read_until(source, ends, pieces.append)
    if end:
        value: list[str] = []
        _Trimmed(value.append).write("".join(pieces))
        writer.arguments(before + to_json("".join(value), types))
    else:
        writer.text("".join([held, *pieces]))
    return end


class _Trimmed:
    """Passes text on without one line break at its beginning and one at its end, which the template added."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._begun = False
        self._line_break = ""  # held back, since it may be the last character

    def write(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if text:
            self._write(text)


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    return CallGrammar(call=call_rules, between="\n")


FORMAT = Format(read=read, grammar=grammar, markers=(_BEGIN, _END), keeps_special_tokens=False)
