"""vLLM's `pythonic`: Llama 3.2 and 4, ToolACE and others, which write all calls as a list:

[f(a=1, b="x"), g()]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from jaxpage.tool_parsers.call_grammar import CallGrammar, Literal, json_rule
from jaxpage.tool_parsers.parser import Format
from jaxpage.tool_parsers.python_literal import read_literal
from jaxpage.tool_parsers.source import SPACE, Reading, Source, read_rest
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.writer import Writer

_WORD = re.compile(r"\w*")


def read(source: Source, writer: Writer, tools: tuple[Tool, ...]) -> Reading[None]:
    """The list must begin the output, as in vLLM. Each part of an argument is written once it is complete."""
    source.hold()
    yield from source.run(SPACE)
    if (yield from source.match("[")) and (yield from read_calls(source, writer)):
        source.take_held()
    writer.text(source.take_held())
    yield from read_rest(source, writer.text)


def read_calls(source: Source, writer: Writer) -> Reading[bool]:
    """The calls of a list behind its bracket, and the one that closes it. False: what comes next is no call; the source
    holds what was not written.
    """
    while True:
        yield from source.run(SPACE)
        name = yield from source.run(_WORD)
        if not (name.isidentifier() and (yield from source.match("("))):
            return False
        if not (yield from _read_arguments(source, writer, name)):
            return False
        yield from source.run(SPACE)
        separator = yield from source.match(",", "]")
        if separator == ",":
            yield from source.run(SPACE)
            separator = (yield from source.match("]")) or ","
        if separator != ",":
            return separator == "]"


def _read_arguments(source: Source, writer: Writer, name: str) -> Reading[bool]:
    """Arguments between parentheses. The source holds what was read since the last delta."""
    before = "{"  # written before the next piece
    num_pieces = 0

    def write(text: str) -> None:
        nonlocal before, num_pieces
        if not num_pieces:
            writer.start(name)
        writer.arguments(before + text)
        source.hold()
        before, num_pieces = "", num_pieces + 1

    separator = ","
    while separator == ",":
        yield from source.run(SPACE)
        separator = yield from source.match(")")
        if separator:
            break
        key = yield from source.run(_WORD)
        yield from source.run(SPACE)
        if not (key.isidentifier() and (yield from source.match("="))):
            return False
        yield from source.run(SPACE)
        before += f"{json.dumps(key, ensure_ascii=False)}: "
        if not (yield from read_literal(source, write)):
            return False
        yield from source.run(SPACE)
        separator = yield from source.match(",", ")")
        before = ", "
    if separator:
        before = "" if num_pieces else "{"
        write("}")
    return bool(separator)


def grammar(special_tokens: Mapping[str, int]) -> CallGrammar:
    """Values are JSON: the parser accepts it besides Python's literals."""
    return CallGrammar(call=call_rules, begin="[", between=", ", end="]")


def call_rules(tool: Tool, rule: str, literal: Literal) -> list[str]:
    """`f(a=1, b=2)` in the order of the schema; optional arguments may be missing."""
    for name in (tool.name, *tool.properties):
        if not name.isidentifier():
            raise ValueError(
                f"{name!r} of tool {tool.name!r} is no identifier, so it cannot be called as "
                "Python; rename it, or use another tool parser"
            )
    required = tool.parameters.get("required", ())
    names = list(tool.properties)
    rules = [f"{rule}: {literal(f'{tool.name}(')} {rule}_first_0 {literal(')')}"]
    for i, name in enumerate(names):
        argument = f"{literal(f'{name}=')} {rule}_value_{i} {rule}_next_{i + 1}"
        skip = "" if name in required else " | "
        first = f"{skip}{rule}_first_{i + 1}" if skip else ""
        rest = f"{skip}{rule}_next_{i + 1}" if skip else ""
        rules += [
            f"{rule}_first_{i}: {argument}{first}",
            f"{rule}_next_{i}: {literal(', ')} {argument}{rest}",
            json_rule(f"{rule}_value_{i}", tool.schema(name)),
        ]
    return [*rules, f'{rule}_first_{len(names)}: ""', f'{rule}_next_{len(names)}: ""']


FORMAT = Format(read=read, grammar=grammar, keeps_special_tokens=False)
