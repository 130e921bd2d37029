"""Constraints of an output: vLLM's `StructuredOutputsParams`, and other forms of the same.

Knows names and types. Whether a schema or a grammar compiles is checked when the request is added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass
class StructuredOutputsParams:
    """Exactly one of the first six fields. Names and meanings are vLLM's (0.32).

    Raises ValueError for none or several of them, and for values of other types.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema, or its text
    regex: str | None = None  # of the whole output; Rust's syntax without look-around
    choice: list[str] | None = None  # the output must be one of these
    grammar: str | None = None  # llguidance's Lark, or EBNF in llama.cpp's GBNF
    json_object: bool | None = None  # any JSON object
    disable_any_whitespace: bool = False  # between tokens of JSON
    disable_additional_properties: bool = False  # in objects whose schema does not mention them
    whitespace_pattern: str | None = None  # a regex for whitespace between tokens of JSON
    structural_tag: str | None = None  # JSON: text with parts that must match a schema, as in vLLM

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, got "
                f"{' and '.join(given) or 'none of them'}"
            )
        if isinstance(self.choice, tuple):
            self.choice = list(self.choice)
        _check("json", self.json, (str, dict), "a JSON schema: a dict or its text")
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            _check(name, getattr(self, name), (str,), "a string")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            _check(name, getattr(self, name), (bool,), "True or False")
        _check("json_object", self.json_object, (bool,), "True or None")
        is_list = isinstance(self.choice, list)
        if self.choice is not None and not (
            is_list and self.choice and all(isinstance(x, str) and x for x in self.choice)
        ):
            raise ValueError(
                f"choice of structured_outputs must be a list of strings, none empty, got {self.choice!r:.200}"
            )


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """The name of `StructuredOutputsParams` before vLLM 0.12. The backend cannot be chosen."""

    backend: str | None = None
    backend_was_auto: bool = False
    disable_fallback: bool = False


def _check(name: str, value: Any, types: tuple[type, ...], expected: str) -> None:
    if value is not None and not isinstance(value, types):
        raise ValueError(f"{name} of structured_outputs must be {expected}, got {value!r:.200}")


def to_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """The params, from themselves or a dict of their fields. Raises ValueError."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    names = {f.name for f in dataclasses.fields(GuidedDecodingParams)}
    if not isinstance(value, Mapping) or not set(value) <= names:
        raise ValueError(
            f"structured_outputs must be a StructuredOutputsParams or a dict of {', '.join(sorted(names))}, "
            f"got {value!r:.200}"
        )
    return GuidedDecodingParams(**value)


def from_response_format(response_format: Any) -> StructuredOutputsParams | None:
    """From OpenAI's `response_format`, or LMDeploy's with "regex_schema". None for text. Raises ValueError."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        schema = response_format.get("json_schema")
        if isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping):
            return StructuredOutputsParams(json=dict(schema["schema"]))
        raise ValueError(
            'response_format of type json_schema needs {"json_schema": {"schema": {...}}}, got '
            f"{response_format!r:.200}"
        )
    if kind == "regex_schema":
        return StructuredOutputsParams(regex=response_format.get("regex_schema"))
    if kind == "structural_tag":
        import json

        return StructuredOutputsParams(structural_tag=json.dumps(dict(response_format)))
    raise ValueError(
        "response_format must have the type text, json_object, json_schema, regex_schema or structural_tag, got "
        f"{response_format!r:.200}"
    )
