"""Grammars that force calls, for `tool_choice`, in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxpage.tool_parsers.call_grammar import literal_with
from jaxpage.tool_parsers.formats import find_format
from jaxpage.tool_parsers.tools import Tool, to_tools


def tool_grammar(
    name: str,
    tools: Any,
    tool_choice: Any,
    *,
    parallel_tool_calls: bool = True,
    special_tokens: Mapping[str, int] | None = None,
) -> str:
    """A grammar for outputs that the tool parser `name` reads as calls, with arguments that fit the tools' parameters.

    `tool_choice`: "required" for one or more calls of any tools (exactly one without `parallel_tool_calls`), or
    `{"type": "function", "function": {"name": ...}}` for exactly one call of that tool.

    `special_tokens`: the ids of those of the format's `markers` that are special tokens. A marker without an id is
    spelled with ordinary tokens.

    Raises ValueError that names the tool that cannot be forced, and says why.
    """
    chosen = _chosen(tools, tool_choice)
    format_ = find_format(name)
    for tool in chosen:
        _check_schema(tool)
    special_tokens = special_tokens or {}
    several = tool_choice == "required" and parallel_tool_calls
    rules = format_.grammar(special_tokens).rules(
        chosen, literal_with(special_tokens), several=several
    )
    return "\n".join(rules) + "\n"


def _chosen(tools: Any, tool_choice: Any) -> tuple[Tool, ...]:
    """Those that can be called. The others need not be usable in a grammar."""
    offered = to_tools(tools, are_forced=False)
    names = ", ".join(tool.name for tool in offered) or "none"
    if tool_choice == "required":
        if not offered:
            raise ValueError('tool_choice="required" needs tools, and the request has none')
        return to_tools(tools)
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise ValueError(
            'tool_choice must be "required" or {"type": "function", "function": {"name": ...}}, '
            f"got {tool_choice!r}"
        )
    found = [given for given, tool in zip(tools or (), offered, strict=True) if tool.name == name]
    if not found:
        raise ValueError(f"tool_choice names the tool {name!r}, the request's tools are: {names}")
    return to_tools(found)


def _check_schema(tool: Tool) -> None:
    """llguidance's own error would not name the tool."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(dict(tool.parameters)))
    error = LLMatcher.validate_grammar(grammar, None)
    if error:
        raise ValueError(f"parameters of tool {tool.name!r} cannot be forced: {error.strip()}")
