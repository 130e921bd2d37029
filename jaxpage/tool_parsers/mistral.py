"""vLLM's `mistral`. Tokenizers before version 11 write all calls as a list, later ones write each separately:

    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}

`[ARGS]` may be missing, or follow `[CALL_ID]` and an id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxpage.tool_parsers.call_grammar import CallGrammar, json_call
from jaxpage.tool_parsers.json_text import read_arguments, read_call
from jaxpage.tool_parsers.parser import Format
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.writer import Writer

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKERS = Markers(_CALLS)
_WORD = re.compile(r"[^\s\[\]{}<>\"]*")


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    while (yield from read_until(source, _MARKERS, writer.text)):
        yield from source.run(SPACE)
        is_list = yield from source.match("[")
        if (yield from (_read_list if is_list else _read_call)(source, writer)):
            source.take_held()
        writer.text(source.take_held())


def _read_list(source: Source, writer: Writer) -> Reading[bool]:
    separator = ","
    while separator == ",":
        yield from source.run(SPACE)
        if not (yield from read_call(source, writer, ("arguments",), needs_arguments=False)):
            return False
        yield from source.run(SPACE)
        separator = yield from source.match(",", "]")
    return separator == "]"


def _read_call(source: Source, writer: Writer) -> Reading[bool]:
    name = yield from source.run(_WORD)
    yield from source.run(SPACE)
    mark = yield from source.match(_ID, _ARGS)
    if mark == _ID:
        yield from source.run(_WORD)
        yield from source.match(_ARGS)
    yield from source.run(SPACE)
    return bool(name) and (yield from read_arguments(source, writer, name))


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    """A list, unless the tokenizer has `[ARGS]`: vLLM's rule."""
    if _ARGS in special_tokens:
        return CallGrammar(call=json_call(f"{_CALLS}%s{_ARGS}", ""))
    call = json_call('{"name": "%s", "arguments": ', "}")
    return CallGrammar(call=call, begin=f"{_CALLS}[", between=", ", end="]")


FORMAT = Format(read=read, grammar=grammar, markers=(_CALLS, _ID, _ARGS), keeps_special_tokens=True)
