"""The grammar of `qwen3_coder`: values are plain texts that fit the schema after the parser's conversion.

One limitation: if a schema allows strings and other types, a string that reads as another type is converted to that
type, even if this violates the rest of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxpage.tool_parsers.call_grammar import Literal, json_rule
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.values import resolve, schema_types

_END = "\n</parameter>\n"
_DEFINITIONS = ("$defs", "definitions")
_MAX_REFERENCES = 10  # in a row


def call_rules(tool: Tool, rule: str, literal: Literal) -> list[str]:
    """Parameters in the order of the schema; optional ones may be missing."""
    required = tool.parameters.get("required", ())
    ends = ["</parameter>", "</function>\n</tool_call>"]
    ends += [f"<parameter={name}>" for name in tool.properties]
    parts, rules = [], []
    for i, name in enumerate(tool.properties):
        if not name or set(name) & set("<>\n") or name != name.strip():
            raise ValueError(
                f"parameter {name!r} of tool {tool.name!r} cannot be written as qwen3_coder; "
                "rename it, or use another tool parser"
            )
        part = f"{rule}_{i}"
        parts.append(part if name in required else f"{part}?")
        opening = f"<parameter={name}>\n"
        rules.append(f"{part}: {literal(opening)} {part}_value")
        rules += _value_rules(f"{part}_value", tool.schema(name), literal, ends)
    begin = literal(f"<tool_call>\n<function={tool.name}>\n")
    end = literal("</function>\n</tool_call>")
    return [f"{rule}: {begin} {' '.join(parts)} {end}", *rules]


def _value_rules(rule: str, schema: Any, literal: Literal, ends: list[str]) -> list[str]:
    """A value and its closing tag."""
    schema = _resolved(schema)
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        texts = (v if isinstance(v, str) else json.dumps(v) for v in values)
        return [f"{rule}: {' | '.join(literal(text + _END) for text in texts)}"]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options and "type" not in schema:
        shared = {k: schema[k] for k in _DEFINITIONS if k in schema}
        names = [f"{rule}_{i}" for i in range(len(options))]
        rules = [f"{rule}: {' | '.join(names)}"]
        for name, option in zip(names, options, strict=True):
            rules += _value_rules(name, shared | dict(option), literal, ends)
        return rules
    types = schema_types(schema)
    if "string" not in types:
        return _json_rules(rule, schema, literal)
    rules = _text_rules(f"{rule}_text", schema, ends)
    others = [type_ for type_ in types if type_ != "string"]
    if not others:
        return [f"{rule}: {rule}_text", *rules]
    others_rules = _json_rules(f"{rule}_json", schema | {"type": others}, literal)
    return [f"{rule}: {rule}_text | {rule}_json", *rules, *others_rules]


def _resolved(schema: Any) -> dict[str, Any]:
    """The schema with references resolved, and its definitions; {} if it says nothing."""
    root = schema
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" not in schema:
            break
        schema = resolve(schema["$ref"], root)
    shared = {k: root[k] for k in _DEFINITIONS if k in root}
    return shared | dict(schema or {})


def _json_rules(rule: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
    return [f"{rule}: {rule}_value {literal(_END)}", json_rule(f"{rule}_value", schema)]


def _text_rules(rule: str, schema: Mapping[str, Any], ends: list[str]) -> list[str]:
    """Any text with the schema's lengths and pattern that contains no tag that would end it."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    terminal = rule.upper()
    text = f"/(?s:.{{{low},{high}}})/" if low or high != "" else "/(?s:.*)/"
    texts = [text, f"~/(?s:.*)({'|'.join(map(_regex, ends))})(?s:.*)/"]
    if "pattern" in schema:
        texts.append(_search(schema["pattern"]))
    return [
        f"{rule}[suffix={json.dumps(_END)}]: {terminal}",
        f"{terminal}: {' & '.join(texts)}",
    ]


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _search(pattern: str) -> str:
    """A regex for all texts that contain a match of the pattern, as in JSON Schema."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") else "(?s:.*)"
    inner = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
    return f"/{begin}({inner}){end}/"
