"""vLLM's `llama3_json`: Llama 3.1, 3.2 and 3.3, whose templates specify

    {"name": "f", "parameters": {"a": 1}}

possibly after `<|python_tag|>`; several calls are separated by `;`, or are a list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxpage.tool_parsers.call_grammar import CallGrammar, json_call
from jaxpage.tool_parsers.json_text import read_call
from jaxpage.tool_parsers.parser import Format
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.writer import Writer

_TAG = "<|python_tag|>"
_MARKERS = Markers("[", "{", _TAG)
_KEYS = ("parameters", "arguments")
_BETWEEN = re.compile(r"[ \t\r\n,;]*")  # calls of a list


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    """Any object with a name and parameters is a call, at any place, as in vLLM. Brackets around calls are dropped."""
    while marker := (yield from read_until(source, _MARKERS, writer.text)):
        if marker == "{":
            source.pos -= 1  # `read_call` reads the brace itself
        if marker == _TAG:
            yield from source.run(SPACE)
            is_list = bool((yield from source.match("[")))
        else:
            is_list = marker == "["
        if (yield from (_read_list if is_list else _read_call)(source, writer)):
            source.take_held()
        writer.text(source.take_held())


def _read_list(source: Source, writer: Writer) -> Reading[bool]:
    """Reads calls and the bracket behind them. False at anything else."""
    yield from source.run(SPACE)
    while (yield from _read_call(source, writer)):
        yield from source.run(_BETWEEN)
        if (yield from source.match("]")):
            return True
    return False


def _read_call(source: Source, writer: Writer) -> Reading[bool]:
    return (yield from read_call(source, writer, _KEYS, needs_arguments=True))


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    return CallGrammar(call=json_call('{"name": "%s", "parameters": ', "}"), between="; ")


FORMAT = Format(
    read=read, grammar=grammar, markers=(_TAG,), keeps_special_tokens=True, separators=";,]"
)
