"""Converts arguments written as plain text by their JSON schema, like vLLM's `qwen3_coder`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxpage.tool_parsers.json_text import MAX_DEPTH, read_json
from jaxpage.tool_parsers.python_literal import read_literal
from jaxpage.tool_parsers.source import Reading, Source, read_whole

# Names that are not JSON Schema's, but occur in tools -> those that are.
_ALIASES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64"), "integer"),
    **dict.fromkeys(("long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    "bool": "boolean",
    "dict": "object",
    **dict.fromkeys(("arr", "list", "sequence"), "array"),
}
DEFINITIONS = ("$defs", "definitions")
_MAX_REFERENCES = 10  # in a row
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def known_types(schema: Any) -> tuple[str, ...]:
    """The types that a value may have, in the schema's order; () if it says nothing of them."""
    return tuple(dict.fromkeys(_types(schema, schema, 0)))


def schema_types(schema: Any) -> tuple[str, ...]:
    """The types that a value may have, in the schema's order; "string" by default."""
    return known_types(schema) or ("string",)


def _types(schema: Any, root: Any, depth: int) -> list[str]:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:  # a reference may point to itself
        return []
    if "type" in schema:
        found = schema["type"]
        names = [str(t).strip().lower() for t in (found if isinstance(found, list) else [found])]
        return [_ALIASES.get(name, name) for name in names]
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


def resolved(schema: Any) -> dict[str, Any]:
    """The schema with references resolved, and its definitions; {} if it says nothing."""
    root = schema
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" not in schema:
            break
        schema = resolve(schema["$ref"], root)
    shared = {k: root[k] for k in DEFINITIONS if k in root}
    return shared | dict(schema or {})


def to_json(text: str, types: tuple[str, ...]) -> str:
    """The JSON of a text, read as the first of `types`, in vLLM's order, that it fits.

    If it fits none, it is read as any JSON, or else becomes a string. Python's None is null where no string is
    possible.
    """
    stripped = text.strip()
    if "null" in types and stripped.lower() == "null":
        return "null"
    for type_, read in _READERS.items():
        if type_ in types and (found := read(stripped)) is not None:
            return found
    if "string" in types:
        return _string(text)
    if stripped == "None":  # as templates write it
        return "null"
    return _json(stripped) or _string(text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _integer(text: str) -> str | None:
    try:
        return str(int(text))
    except ValueError:
        return None


def _number(text: str) -> str | None:
    """Whole numbers are written as such."""
    if (whole := _integer(text)) is not None:
        return whole
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):  # not in JSON
        return None
    return str(int(value)) if value.is_integer() else repr(value)


def _boolean(text: str) -> str | None:
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.lower())


def _object(text: str) -> str | None:
    found = _json(text) or _literal(text)
    return found if found and found[0] == "{" else None


def _array(text: str) -> str | None:
    found = _json(text) or _literal(text)
    return found if found and found[0] == "[" else None


# In the order in which they are tried.
_READERS: dict[str, Callable[[str], str | None]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _object,
    "array": _array,
}


def _json(text: str) -> str | None:
    return _read_all(text, read_json)


def _literal(text: str) -> str | None:
    return _read_all(text, read_literal)


def _read_all(
    text: str, read: Callable[[Source, Callable[[str], None]], Reading[bool]]
) -> str | None:
    """As JSON, if `read` reads the whole text as one value, without numbers that are too large."""
    pieces: list[str] = []
    complete, rest = read_whole(text, lambda source: read(source, pieces.append))
    found = "".join(pieces)
    try:
        json.dumps(json.loads(found), allow_nan=False)
    except ValueError:
        return None
    return found if complete and not rest else None
