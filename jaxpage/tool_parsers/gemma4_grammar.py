"""The grammar of `gemma4`: values in its own notation, which has JSON's types, that fit the schema.

One limitation: a string whose schema allows other types is converted if it reads as one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxpage.tool_parsers.call_grammar import Literal, json_rule
from jaxpage.tool_parsers.tagged_grammar import text_terminal
from jaxpage.tool_parsers.tools import Tool
from jaxpage.tool_parsers.values import DEFINITIONS, known_types, resolved

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

_ANY_TYPE = ("string", "number", "boolean", "null", "object", "array")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_REFUSED = ("allOf", "patternProperties", "prefixItems", "minProperties", "maxProperties")
_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"  # of an object whose keys the schema does not name


def call_rules(tool: Tool, rule: str, literal: Literal) -> list[str]:
    values = _Values(tool, rule, literal)
    arguments = values.rule(tool.parameters)
    call = f"{rule}: {literal(f'{BEGIN}call:{tool.name}')} {arguments} {literal(END)}"
    return [call, *values.rules]


class _Values:
    """The rules of the values of one call. All uses of a reference share a rule, so it may refer to itself."""

    def __init__(self, tool: Tool, prefix: str, literal: Literal):
        self.rules: list[str] = []
        self._tool = tool
        self._prefix = prefix
        self._literal = literal
        self._names: dict[str, str] = {}  # of rules of references, and of schemas that say nothing
        self._num_rules = 0

    def rule(self, schema: Any) -> str:
        """The name of the rule for values of a schema."""
        shared = None
        if not isinstance(schema, Mapping) or not set(schema) - set(DEFINITIONS):
            shared = ""
        elif "$ref" in schema:
            shared = str(schema["$ref"])
        if shared is not None and shared in self._names:
            return self._names[shared]
        name = self._new_name()
        if shared is not None:
            self._names[shared] = name
        self._add(name, resolved(schema))
        return name

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"

    def _add(self, name: str, schema: dict[str, Any]) -> None:
        choices = schema.get("anyOf") or schema.get("oneOf")
        if not choices and len(schema.get("allOf", ())) == 1 and "type" not in schema:
            choices = schema["allOf"]
        for keyword in _REFUSED:
            if keyword in schema and schema[keyword] is not choices:
                raise ValueError(
                    f"{keyword} in parameters of tool {self._tool.name!r} cannot be forced as gemma4; "
                    "leave it out, or use another tool parser"
                )
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            options = [self._literal(_written(value)) for value in values]
        elif choices and "type" not in schema:
            options = [self.rule(_with_definitions(choice, schema)) for choice in choices]
        else:
            options = [self._typed(type_, schema) for type_ in _types(schema)]
        self.rules.append(f"{name}: {' | '.join(options)}")

    def _typed(self, type_: str, schema: dict[str, Any]) -> str:
        """What a value of this type is in a rule."""
        if type_ == "object":
            return self._object(schema)
        if type_ == "array":
            return self._array(schema)
        name = self._new_name()
        if type_ == "string":
            self._add_string(name, schema)
        else:
            limits = {k: schema[k] for k in _OF_NUMBERS if k in schema}
            self.rules.append(json_rule(name, {"type": type_, **limits}))
        return name

    def _add_string(self, name: str, schema: dict[str, Any]) -> None:
        quote = self._literal(QUOTE)
        terminal = name.upper()
        if quote.startswith("<["):  # a special token, which no text contains
            self.rules.append(f"{name}: {quote} {terminal} {quote}")
        else:
            self.rules.append(f"{name}: {quote} {name}_text")
            self.rules.append(f"{name}_text[suffix={json.dumps(QUOTE)}]: {terminal}")
        self.rules.append(text_terminal(terminal, schema, [QUOTE, END]))

    def _object(self, schema: dict[str, Any]) -> str:
        """Keys in the order of the templates; optional ones may be missing."""
        properties = schema.get("properties") or {}
        others = schema.get("additionalProperties", True)
        if not properties:
            if others is False:
                return self._literal("{}")
            member = f'{_KEY} ":" {self.rule(_with_definitions(others, schema))}'
            return f'"{{" ({member} ("," {member})*)? "}}"'
        name = self._new_name()
        keys = sorted(properties, key=str.lower)
        for i, key in enumerate(keys):
            if not key or set(key) & set(':,{}()[]<>\n"') or key != key.strip():
                raise ValueError(
                    f"parameter {key!r} of tool {self._tool.name!r} cannot be written as gemma4; "
                    "rename it, or use another tool parser"
                )
            value = self.rule(_with_definitions(properties[key], schema))
            member = f"{self._literal(f'{key}:')} {value} {name}_next_{i + 1}"
            is_optional = key not in schema.get("required", ())
            self.rules.append(
                f"{name}_first_{i}: {member}{f' | {name}_first_{i + 1}' if is_optional else ''}"
            )
            self.rules.append(
                f'{name}_next_{i}: "," {member}{f" | {name}_next_{i + 1}" if is_optional else ""}'
            )
        self.rules += [f'{name}_first_{len(keys)}: ""', f'{name}_next_{len(keys)}: ""']
        return f'"{{" {name}_first_0 "}}"'

    def _array(self, schema: dict[str, Any]) -> str:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return self._literal("[]")
        item = self.rule(_with_definitions(schema.get("items", True), schema))
        more = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        items = f'{item} ("," {item}){more}'
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'


def _with_definitions(schema: Any, outer: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {k: outer[k] for k in DEFINITIONS if k in outer} | dict(schema)


def _types(schema: dict[str, Any]) -> tuple[str, ...]:
    found = known_types(schema)
    if not found and "properties" in schema:
        return ("object",)
    if not found and "items" in schema:
        return ("array",)
    return found or _ANY_TYPE


def _written(value: Any) -> str:
    """A value as the templates write it."""
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case dict():
            return f"{{{','.join(f'{k}:{_written(v)}' for k, v in value.items())}}}"
        case list():
            return f"[{','.join(map(_written, value))}]"
    return json.dumps(value)
