"""Parsing of tool calls in outputs: those of vLLM's tool parsers whose models jaxpage supports.

Knows text, and the tools of a request. Must not know tokens, requests or the engine.
"""

from jaxpage.tool_parsers.deltas import (
    Delta,
    ParsedOutput,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    join,
    without_parallel_calls,
)
from jaxpage.tool_parsers.formats import FORMATS, make, parse, parser_for_template
from jaxpage.tool_parsers.grammar import tool_grammar
from jaxpage.tool_parsers.parser import Format, Parser

__all__ = [
    "FORMATS",
    "Delta",
    "Format",
    "ParsedOutput",
    "Parser",
    "ReasoningDelta",
    "TextDelta",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "join",
    "make",
    "parse",
    "parser_for_template",
    "tool_grammar",
    "without_parallel_calls",
]
