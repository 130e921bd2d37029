"""vLLM's `hermes`: Nous Hermes 2 Pro, Qwen2.5, Qwen3, Qwen3-Next and Granite 4, whose templates specify

<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpage.tool_parsers.call_grammar import CallGrammar, json_call
from jaxpage.tool_parsers.json_text import read_call
from jaxpage.tool_parsers.parser import Format
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.writer import Writer

_BEGIN, _END = "<tool_call>", "</tool_call>"
_MARKERS = Markers(_BEGIN)
_KEYS = ("arguments", "parameters")  # some models use Llama's name


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    """A call without arguments gets `{}`. The end marker may be missing."""
    while (yield from read_until(source, _MARKERS, writer.text)):
        yield from source.run(SPACE)
        if (yield from read_call(source, writer, _KEYS, needs_arguments=False)):
            yield from source.run(SPACE)
            if (yield from source.match(_END)):
                source.take_held()
        writer.text(source.take_held())


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    before = f'{_BEGIN}\n{{"name": "%s", "arguments": '
    return CallGrammar(call=json_call(before, f"}}\n{_END}"), between="\n")


# Hermes 2 Pro's markers are special tokens, Qwen's are not.
FORMAT = Format(read=read, grammar=grammar, markers=(_BEGIN, _END), keeps_special_tokens=True)
