"""The tools of a request: OpenAI's list, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Names that no format confuses with its own syntax.
_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # the JSON schema of an object

    @property
    def properties(self) -> Mapping[str, Any]:
        return self.parameters.get("properties", {})

    def schema(self, name: str) -> Any:
        """The schema of one argument, with the definitions that it may refer to; None for an unknown name."""
        schema = self.properties.get(name)
        if not isinstance(schema, Mapping):
            return schema
        shared = {k: self.parameters[k] for k in ("$defs", "definitions") if k in self.parameters}
        return shared | dict(schema)


ANY_TOOL = Tool("", {})  # one of which nothing is known


def to_tools(tools: Any, *, are_forced: bool = True) -> tuple[Tool, ...]:
    """Tools from `[{"type": "function", "function": {"name": ..., "parameters": {...}}}, ...]` or None.

    A tool without parameters takes no arguments. Unless `are_forced`, names may have any characters and occur more than
    once, and parameters that are no schema of an object say nothing about the arguments: models may call such tools,
    but no grammar can be built from them. Raises ValueError that names the invalid tool.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise ValueError(f"tools must be a list, got {tools!r}")
    found = tuple(_to_tool(i, tool, are_forced=are_forced) for i, tool in enumerate(tools))
    if not are_forced:
        return found
    names = [tool.name for tool in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} tools have the name {name!r}; names must differ")
    return found


def _to_tool(index: int, tool: Any, *, are_forced: bool) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(
            f'tool {index} must be {{"type": "function", "function": {{"name": ...}}}}, got {tool!r}'
        )
    name = function.get("name")
    if not isinstance(name, str) or (are_forced and not _NAME.fullmatch(name)):
        raise ValueError(
            f"the name of tool {index} must be letters, digits and any of _ . : / -, got {name!r}"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"parameters of tool {name!r} must be a JSON schema, got {parameters!r}")
    try:
        _check_parameters(name, parameters)
    except ValueError:
        if are_forced:
            raise
        parameters = {}
    return Tool(name, {"type": "object", **parameters})


def _check_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    if parameters.get("type", "object") != "object":
        raise ValueError(
            f'parameters of tool {name!r} must be of type "object", got {parameters["type"]!r}'
        )
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping) or not all(
        isinstance(p, Mapping | bool) for p in properties.values()
    ):
        raise ValueError(
            f"properties of tool {name!r} must be a dict of JSON schemas, got {properties!r}"
        )
    required = parameters.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(r, str) for r in required):
        raise ValueError(f"required of tool {name!r} must be a list of names, got {required!r}")
