"""vLLM's `deepseek_v3`: DeepSeek V3 and R1, whose templates write

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"a": 1}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>...<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxpage.tool_parsers.call_grammar import CallGrammar, json_call
from jaxpage.tool_parsers.json_text import read_arguments
from jaxpage.tool_parsers.parser import Format
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.writer import Writer

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_MARKERS = Markers(_CALLS, _CALL)
_WORD = re.compile(r"[^\s<>{`]*")


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    while marker := (yield from read_until(source, _MARKERS, writer.text)):
        if marker == _CALLS:
            yield from source.run(SPACE)
            marker = yield from source.match(_CALL)
        while marker == _CALL:
            marker = ""
            if (yield from _read_call(source, writer)):
                yield from source.run(SPACE)
                marker = yield from source.match(_CALL, _CALLS_END)
        if marker == _CALLS_END:
            source.take_held()
        writer.text(source.take_held())


def _read_call(source: Source, writer: Writer) -> Reading[bool]:
    yield from source.run(_WORD)  # its type, "function"
    if not (yield from source.match(_SEPARATOR)):
        return False
    name = yield from source.run(_WORD)
    yield from source.run(SPACE)
    if not (name and (yield from source.match("```json"))):
        return False
    yield from source.run(SPACE)
    if not (yield from read_arguments(source, writer, name)):
        return False
    yield from source.run(SPACE)
    if not (yield from source.match("```")):
        return False
    yield from source.match(_CALL_END)
    source.hold()
    return True


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    before = f"{_CALL}function{_SEPARATOR}%s\n```json\n"
    call = json_call(before, f"\n```{_CALL_END}")
    return CallGrammar(call=call, begin=_CALLS, between="\n", end=_CALLS_END)


FORMAT = Format(
    read=read,
    grammar=grammar,
    markers=(_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR),
    keeps_special_tokens=True,
)
