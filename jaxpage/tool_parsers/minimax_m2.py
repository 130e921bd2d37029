"""vLLM's `minimax_m2`: MiniMax-M2, whose templates specify

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="a">1</parameter>
    </invoke>
    </minimax:tool_call>

Several calls are in one pair of the outer tags.
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

_BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = "<invoke name=", "</invoke>"
_PARAMETER, _PARAMETER_END = "<parameter name=", "</parameter>"
_MARKERS = Markers(_BEGIN, _INVOKE)
_NAME = re.compile(r"[^<>\"'\n]*")


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    """As in vLLM, the outer tags may be missing, and names may have other quotes or none."""
    by_name = {tool.name: tool for tool in tools}
    while marker := (yield from read_until(source, _MARKERS, writer.text)):
        if marker == _BEGIN:
            yield from source.run(SPACE)
            marker = yield from source.match(_INVOKE)
        name = (yield from _read_name(source)) if marker == _INVOKE else ""
        if name:
            writer.start(name)
            tool = by_name.get(name, ANY_TOOL)
            if (yield from read_parameters(source, writer, tool, _TAGS)) == _INVOKE_END:
                yield from source.run(SPACE)
                if (yield from source.match(_END)):
                    source.take_held()
        writer.text(source.take_held())


def _read_name(source: Source) -> Reading[str]:
    """The name in an opening tag, and the rest of the tag."""
    quote = yield from source.match('"', "'")
    name = (yield from source.run(_NAME)).strip()
    return name if (yield from source.match(f"{quote}>")) else ""


def _value_stops(tool: Tool, seen: set[str]) -> list[str]:
    """What ends a value without its closing tag: the end of the call, or the start of another parameter."""
    names = (name for name in tool.properties if _NAME.fullmatch(name) and name not in seen)
    return [_INVOKE_END, *(f'{_PARAMETER}"{name}">' for name in names)]


_TAGS = Tags(
    parameter=_PARAMETER,
    read_name=_read_name,
    value_end=_PARAMETER_END,
    call_ends=(_INVOKE_END, _END),
    value_stops=_value_stops,
)
_CALL = TaggedCall(
    format="minimax_m2",
    begin=f'{_INVOKE}"%s">\n',
    parameter=f'{_PARAMETER}"%s">',
    value_end=f"{_PARAMETER_END}\n",
    end=f"{_INVOKE_END}\n",
    stops=(_PARAMETER_END, _INVOKE_END),
    parameter_stop=f'{_PARAMETER}"%s">',
    name_excludes="<>\"'\n",
)


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    return CallGrammar(call=_CALL.rules, begin=f"{_BEGIN}\n", end=_END)


# Whether the markers are special tokens depends on the tokenizer; vLLM keeps special tokens, too.
FORMAT = Format(read=read, grammar=grammar, markers=(_BEGIN, _END), keeps_special_tokens=True)
