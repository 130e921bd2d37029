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
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MARKERS = Markers(_BEGIN, _FUNCTION)
_NAME = re.compile(r"[^<>\n]*")


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
                tool = by_name.get(name, ANY_TOOL)
                if (yield from read_parameters(source, writer, tool, _TAGS)) == _FUNCTION_END:
                    yield from source.run(SPACE)
                    if (yield from source.match(_END)):
                        source.take_held()
        writer.text(source.take_held())


def _read_name(source: Source) -> Reading[str]:
    name = (yield from source.run(_NAME)).strip()
    return name if (yield from source.match(">")) else ""


def _value_stops(tool: Tool, seen: set[str]) -> list[str]:
    """The start of the call's next part."""
    names = (name for name in tool.properties if _NAME.fullmatch(name) and name not in seen)
    return [f"{_FUNCTION_END}\n{_END}", *(f"{_PARAMETER}{name}>" for name in names)]


_TAGS = Tags(
    parameter=_PARAMETER,
    read_name=_read_name,
    value_end=_PARAMETER_END,
    call_ends=(_FUNCTION_END, _END),
    value_stops=_value_stops,
    trims=True,
)
_CALL = TaggedCall(
    format="qwen3_coder",
    begin=f"{_BEGIN}\n{_FUNCTION}%s>\n",
    parameter=f"{_PARAMETER}%s>\n",
    value_end=f"\n{_PARAMETER_END}\n",
    end=f"{_FUNCTION_END}\n{_END}",
    stops=(_PARAMETER_END, f"{_FUNCTION_END}\n{_END}"),
    parameter_stop=f"{_PARAMETER}%s>",
)


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    return CallGrammar(call=_CALL.rules, between="\n")


FORMAT = Format(read=read, grammar=grammar, markers=(_BEGIN, _END), keeps_special_tokens=False)
