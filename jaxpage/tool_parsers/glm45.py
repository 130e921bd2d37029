"""vLLM's `glm45` and `glm47`: GLM-4.5 and later. The templates of GLM-4.5 and 4.6 write

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

and those of GLM-4.7 the same without line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxpage.tool_parsers.call_grammar import CallGrammar
from jaxpage.tool_parsers.parser import Format
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.tagged import Tags, read_parameters
from jaxpage.tool_parsers.tagged_grammar import TaggedCall
from jaxpage.tool_parsers.tools import ANY_TOOL, Tool
from jaxpage.tool_parsers.writer import Writer

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_MARKERS = Markers(_BEGIN)
# Without braces: a call of hermes has none.
_NAME = re.compile(r"[^<>{}\n]*")
_KEY_NAME = re.compile(r"[^<>\n]*")


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    by_name = {tool.name: tool for tool in tools}
    while (yield from read_until(source, _MARKERS, writer.text)):
        yield from source.run(SPACE)
        name = (yield from source.run(_NAME)).strip()
        yield from source.run(SPACE)
        marker = (yield from source.match(_KEY, _END)) if name else ""
        if marker:
            source.pos -= len(marker)
            writer.start(name)
            yield from read_parameters(source, writer, by_name.get(name, ANY_TOOL), _TAGS)
        writer.text(source.take_held())


def _read_key(source: Source) -> Reading[str]:
    key = (yield from source.run(_KEY_NAME)).strip()
    if not (yield from source.match(_KEY_END)):
        return ""
    yield from source.run(SPACE)
    return key if (yield from source.match(_VALUE)) else ""


_TAGS = Tags(
    parameter=_KEY,
    read_name=_read_key,
    value_end=_VALUE_END,
    call_ends=(_END,),
    value_stops=lambda tool, seen: [_END],
)
_CALL = TaggedCall(
    format="glm45",
    begin=f"\n{_BEGIN}%s",
    parameter=f"\n{_KEY}%s{_KEY_END}\n{_VALUE}",
    value_end=_VALUE_END,
    end=f"\n{_END}",
    stops=(_VALUE_END, _END),
    optional_line_breaks=True,
)


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    return CallGrammar(call=_CALL.rules)


# Whether the markers are special tokens depends on the tokenizer; vLLM keeps special tokens, too.
FORMAT = Format(read=read, grammar=grammar, markers=(_BEGIN, _END), keeps_special_tokens=True)
