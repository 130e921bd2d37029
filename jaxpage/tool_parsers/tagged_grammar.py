"""The grammar of calls with arguments between tags: values are plain texts that fit the schema after the conversion.

One limitation: if a schema allows strings and other types, a string that reads as another type is converted to that
type, even if this violates the rest of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.tool_parsers.call_grammar import Literal, json_rule
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.values import DEFINITIONS, resolved, schema_types


@dataclass(frozen=True, kw_only=True)
class TaggedCall:
    """How a format writes a call. `%s` is the name of the tool or parameter."""

    format: str  # its name
    begin: str
    parameter: str  # begins a parameter
    value_end: str
    end: str
    stops: tuple[str, ...]  # end a value when they are read, so it cannot contain them
    parameter_stop: str = ""  # the same, for the name of each parameter
    name_excludes: str = "<>\n"  # no parameter's name may contain these
    optional_line_breaks: bool = False  # some models write them between tags, others do not

    def rules(self, tool: Tool, rule: str, literal: Literal) -> list[str]:
        """Parameters in the order of the schema; optional ones may be missing."""
        required = tool.parameters.get("required", ())
        stops = list(self.stops)
        if self.parameter_stop:
            stops += [self.parameter_stop % name for name in tool.properties]
        parts, rules = [], []
        for i, name in enumerate(tool.properties):
            if not name or set(name) & set(self.name_excludes) or name != name.strip():
                raise ValueError(
                    f"parameter {name!r} of tool {tool.name!r} cannot be written as {self.format}; "
                    "rename it, or use another tool parser"
                )
            part = f"{rule}_{i}"
            parts.append(part if name in required else f"{part}?")
            rules.append(f"{part}: {self._quoted(self.parameter % name, literal)} {part}_value")
            rules += self._value_rules(f"{part}_value", tool.schema(name), literal, stops)
        begin = self._quoted(self.begin % tool.name, literal)
        end = self._quoted(self.end, literal)
        return [f"{rule}: {begin} {' '.join(parts)} {end}", *rules]

    def _quoted(self, tag: str, literal: Literal) -> str:
        if not self.optional_line_breaks:
            return literal(tag)
        return ' "\\n"? '.join(map(literal, tag.split("\n")))

    def _value_rules(self, rule: str, schema: Any, literal: Literal, stops: list[str]) -> list[str]:
        """A value and its closing tag."""
        schema = resolved(schema)
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            texts = (v if isinstance(v, str) else json.dumps(v) for v in values)
            return [f"{rule}: {' | '.join(literal(text + self.value_end) for text in texts)}"]
        options = schema.get("anyOf") or schema.get("oneOf")
        if options and "type" not in schema:
            shared = {k: schema[k] for k in DEFINITIONS if k in schema}
            names = [f"{rule}_{i}" for i in range(len(options))]
            rules = [f"{rule}: {' | '.join(names)}"]
            for name, option in zip(names, options, strict=True):
                rules += self._value_rules(name, shared | dict(option), literal, stops)
            return rules
        types = schema_types(schema)
        if "string" not in types:
            return self._json_rules(rule, schema, literal)
        terminal = f"{rule}_text".upper()
        rules = [
            f"{rule}_text[suffix={json.dumps(self.value_end)}]: {terminal}",
            text_terminal(terminal, schema, stops),
        ]
        others = [type_ for type_ in types if type_ != "string"]
        if not others:
            return [f"{rule}: {rule}_text", *rules]
        others_rules = self._json_rules(f"{rule}_json", schema | {"type": others}, literal)
        return [f"{rule}: {rule}_text | {rule}_json", *rules, *others_rules]

    def _json_rules(self, rule: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
        return [
            f"{rule}: {rule}_value {literal(self.value_end)}",
            json_rule(f"{rule}_value", schema),
        ]


def text_terminal(terminal: str, schema: Mapping[str, Any], stops: list[str]) -> str:
    """Any text with the schema's lengths and pattern that contains none of `stops`."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    text = f"/(?s:.{{{low},{high}}})/" if low or high != "" else "/(?s:.*)/"
    texts = [text, f"~/(?s:.*)({'|'.join(map(_regex, stops))})(?s:.*)/"]
    if "pattern" in schema:
        texts.append(_search(schema["pattern"]))
    return f"{terminal}: {' & '.join(texts)}"


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _search(pattern: str) -> str:
    """A regex for all texts that contain a match of the pattern, as in JSON Schema."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") else "(?s:.*)"
    inner = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
    return f"/{begin}({inner}){end}/"
