"""Converts arguments written as plain text by their JSON schema, like vLLM's `qwen3_coder`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxpage.tool_parsers.json_text import MAX_DEPTH, read_json
from jaxpage.tool_parsers.python_literal import read_literal
from jaxpage.tool_parsers.source import Reading, Source, read_whole

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def schema_types(schema: Any) -> tuple[str, ...]:
    """The types that a value may have, in the schema's order; "string" by default."""
    return tuple(dict.fromkeys(_types(schema, schema, 0))) or ("string",)


def _types(schema: Any, root: Any, depth: int) -> list[str]:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:  # a reference may point to itself
        return []
    if "type" in schema:
        found = schema["type"]
        return [str(t) for t in found] if isinstance(found, list) else [str(found)]
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        found = [_TYPES.get(type(v), "object") for v in values] if isinstance(values, list) else []
        # Any text is a valid string, so strings come last.
        return sorted(found, key=lambda type_: type_ == "string")
    if "$ref" in schema:
        return _types(resolve(schema["$ref"], root), root, depth + 1)
    found = []
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            found += _types(option, root, depth + 1)
    return found


def resolve(reference: Any, root: Any) -> Any:
    """The target of `#/$defs/x`; None if it does not exist."""
    parts = str(reference).split("/")
    for part in parts[1:]:
        root = root.get(part) if isinstance(root, Mapping) else None
    return root if parts[0] == "#" else None


def to_json(text: str, types: tuple[str, ...]) -> str:
    """The JSON of a text as the first type that it can be read as; otherwise as a string."""
    stripped = text.strip()
    if "null" in types or "string" not in types:
        if stripped.lower() in ("null", "none"):  # templates write Python's None
            return "null"
    for type_ in types:
        found = _string(text) if type_ == "string" else _read_as(stripped, type_)
        if found is not None:
            return found
    return _string(text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read_as(text: str, type_: str) -> str | None:
    if type_ == "boolean":
        return text.lower() if text.lower() in ("true", "false") else None
    for read in (read_json, read_literal):
        found = _read_all(text, read)
        if found is not None:
            return found if _fits(found, type_) else None
    return None


def _read_all(
    text: str, read: Callable[[Source, Callable[[str], None]], Reading[bool]]
) -> str | None:
    """As JSON, if `read` reads the whole text as one value."""
    pieces: list[str] = []
    complete, rest = read_whole(text, lambda source: read(source, pieces.append))
    return "".join(pieces) if complete and not rest else None


def _fits(found: str, type_: str) -> bool:
    match type_:
        case "integer":
            return found.lstrip("-").isdigit()
        case "number":
            return found[0] in "-0123456789"
        case "array":
            return found[0] == "["
        case "object":
            return found[0] == "{"
    return False
