"""Arguments as plain texts between tags, one pair of tags a parameter: what formats that write them have in common.

A value's type is in the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.values import schema_types, to_json
from jaxpage.tool_parsers.writer import Writer


@dataclass(frozen=True, kw_only=True)
class Tags:
    """How a format writes parameters."""

    parameter: str  # begins one
    # Reads the rest of what begins it; returns its name, "" if there is none.
    read_name: Callable[[Source], Reading[str]]
    value_end: str
    call_ends: tuple[str, ...]  # each ends the call
    # Other markers that end a value, for a tool and the names that its call has so far.
    value_stops: Callable[[Tool, set[str]], list[str]]
    trims: bool = False  # the template adds a line break before and after a value


def read_parameters(source: Source, writer: Writer, tool: Tool, tags: Tags) -> Reading[str]:
    """Everything after the function's name. Returns what ends the call, "" if nothing does.

    Afterwards the source holds what is not part of the call.
    """
    writer.arguments("{")
    seen: set[str] = set()
    while True:
        source.hold()
        yield from source.run(SPACE)
        marker = yield from source.match(tags.parameter, *tags.call_ends)
        if marker != tags.parameter:
            break
        name = yield from tags.read_name(source)
        if not name:
            return ""
        before = f"{', ' if seen else ''}{json.dumps(name, ensure_ascii=False)}: "
        seen.add(name)
        ends = Markers(tags.value_end, *tags.value_stops(tool, seen))
        types = schema_types(tool.schema(name))
        end = yield from read_value(source, writer, before, ends, types, trims=tags.trims)
        if not end:
            return ""
        if end != tags.value_end:
            source.pos -= len(end)
    if marker:
        writer.arguments("}")
        source.hold()
    return marker


def read_value(
    source: Source,
    writer: Writer,
    before: str,
    ends: Markers,
    types: tuple[str, ...],
    *,
    trims: bool = False,
) -> Reading[str]:
    """Writes a value after `before`. Returns the marker that ends it, "" if none does; then the source holds nothing.

    A string is written while it is read. What may have another type must be complete to be converted; it is text if it
    does not end.
    """
    held = source.take_held()
    if types == ("string",):
        writer.arguments(before + '"')
        piece = _Trimmed(
            lambda text: writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1]), trims=trims
        )
        end = yield from read_until(source, ends, piece.write)
        if end:
            writer.arguments('"')
    else:
        pieces: list[str] = []
        end = yield from read_until(source, ends, pieces.append)
        if end:
            value: list[str] = []
            _Trimmed(value.append, trims=trims).write("".join(pieces))
            writer.arguments(before + to_json("".join(value), types))
        else:
            writer.text("".join([held, *pieces]))
    source.take_held()
    return end


class _Trimmed:
    """Passes text on; if it `trims`, without one line break at its beginning and one at its end."""

    def __init__(self, write: Callable[[str], None], *, trims: bool):
        self._write = write
        self._begun = not trims
        self._trims = trims
        self._line_break = ""  # held back, since it may be the last character

    def write(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        if self._trims:
            text = self._line_break + text
            self._line_break = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if text:
            self._write(text)
