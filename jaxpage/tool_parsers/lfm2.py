"""vLLM's `lfm2`: LFM2, which writes calls as `pythonic` does, between two markers:

<|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpage.tool_parsers.call_grammar import CallGrammar
from jaxpage.tool_parsers.parser import Format
from jaxpage.tool_parsers.pythonic import call_rules, read_calls
from jaxpage.tool_parsers.source import SPACE, Markers, Reading, Source, read_until
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.writer import Writer

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_MARKERS = Markers(_BEGIN)


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    """Text may come before and after. The end marker may be missing."""
    while (yield from read_until(source, _MARKERS, writer.text)):
        yield from source.run(SPACE)
        if (yield from source.match("[")) and (yield from read_calls(source, writer)):
            source.hold()
            yield from source.run(SPACE)
            if (yield from source.match(_END)):
                source.take_held()
        writer.text(source.take_held())


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    """Values are JSON, as of `pythonic`."""
    return CallGrammar(call=call_rules, begin=f"{_BEGIN}[", between=", ", end=f"]{_END}")


FORMAT = Format(read=read, grammar=grammar, markers=(_BEGIN, _END), keeps_special_tokens=True)
