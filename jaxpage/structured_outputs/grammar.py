"""Converts `StructuredOutputsParams` to the text of a grammar for llguidance, after cheap checks.

Knows schemas and llguidance's formats. Must not know tokenizers, requests or the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import llguidance

from jaxpage.structured_outputs.config import StructuredOutputsConfig
from jaxpage.structured_outputs.params import StructuredOutputsParams

# The speed in llguidance's manual; its limits are amounts of work.
_FUEL_PER_SECOND = 14_000_000
_ITEMS_PER_SECOND = 20_000_000

# Keywords of a schema whose values are schemas.
_ONE = (
    "items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_MANY = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")


def limits(config: StructuredOutputsConfig) -> llguidance.LLParserLimits:
    """The most work that one mask may take."""
    return llguidance.LLParserLimits(
        step_lexer_fuel=max(1, int(config.max_mask_time * _FUEL_PER_SECOND)),
        step_max_items=max(1, int(config.max_mask_time * _ITEMS_PER_SECOND)),
        verbose_errors=False,
    )


def to_grammar(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
    """The text of the grammar. Raises ValueError for one that is too large, nested too deeply or invalid.

    For schemas the message names the place of the error.
    """
    if params.json is not None or params.json_object:
        schema = _schema(params, config)
        grammar = _from_schema(schema, params, config)
        error = _error(grammar, config)
        if error:
            path = _path_of_error(schema, params, config)
            raise ValueError(f"the JSON schema cannot be served; at {path}: {error}")
        return grammar
    kind, text = _other_text(params)
    _check_size(kind, text, config)
    try:
        grammar = _from_text(kind, text, config)
    except KeyError as e:
        raise ValueError(f"the {kind} cannot be served: {e} is missing") from None
    except (ValueError, TypeError, AssertionError, RecursionError) as e:
        raise ValueError(f"the {kind} cannot be served: {e}") from None
    error = _error(grammar, config)
    if error:
        raise ValueError(f"the {kind} cannot be served: {error}")
    return grammar


def _error(grammar: str, config: StructuredOutputsConfig) -> str:
    """What is wrong with it, or "". The lexer is not built yet."""
    return llguidance.LLMatcher.validate_grammar(grammar, limits=limits(config))


def _other_text(params: StructuredOutputsParams) -> tuple[str, str]:
    """(kind, text) of constraints other than schemas."""
    if params.regex is not None:
        return "regex", params.regex
    if params.choice is not None:
        return "choice", json.dumps(params.choice)
    if params.grammar is not None:
        return "grammar", params.grammar
    assert params.structural_tag is not None
    return "structural_tag", params.structural_tag


def _from_text(kind: Any, text: str, config: StructuredOutputsConfig) -> str:
    if kind == "structural_tag":
        return llguidance.StructTag.to_grammar(_tags(text, config), assume_special=False)
    return llguidance.grammar_from(kind, text)


def _check_size(kind: str, text: str, config: StructuredOutputsConfig) -> None:
    size = len(text.encode(errors="replace"))
    if size > config.max_grammar_bytes:
        raise ValueError(
            f"the {kind} has {size} bytes, and structured_outputs_config allows "
            f"max_grammar_bytes={config.max_grammar_bytes}"
        )


def _schema(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> Any:
    """A copy of the schema as JSON: dicts, lists and scalars."""
    if params.json_object:
        return {"type": "object"}
    text = params.json
    if not isinstance(text, str):
        try:
            text = json.dumps(text)
        except (TypeError, ValueError, RecursionError) as e:
            raise ValueError(f"the JSON schema is no JSON: {e}") from None
    _check_size("JSON schema", text, config)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"the JSON schema is no JSON: {e}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a JSON schema must be an object, got {text[:200]}")
    _check_nesting(schema, config.max_nesting)
    return schema


def _check_nesting(schema: Any, max_nesting: int) -> None:
    level, depth = [schema], 0
    while level := [x for x in level if isinstance(x, dict | list)]:
        depth += 1
        if depth > max_nesting:
            raise ValueError(
                f"the JSON schema has more than {max_nesting} objects and lists within each other, which "
                "structured_outputs_config sets as max_nesting"
            )
        level = [y for x in level for y in (x.values() if isinstance(x, dict) else x)]


def _from_schema(
    schema: Any, params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> str:
    if params.disable_additional_properties or config.disable_additional_properties:
        schema = _without_additional_properties(schema)
    tight = params.disable_any_whitespace or config.disable_any_whitespace
    options: Any = {"whitespace_flexible": not tight}
    if params.whitespace_pattern is not None:
        options = {"whitespace_pattern": params.whitespace_pattern}
    if schema is True:
        schema = {}
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)


def _without_additional_properties(schema: Any) -> Any:
    """Objects that list their properties and do not mention others get no others."""
    if isinstance(schema, list):
        return [_without_additional_properties(x) for x in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {k: _without_additional_properties(v) for k, v in schema.items()}
    lists = any(isinstance(schema.get(k), dict) for k in ("properties", "patternProperties"))
    if lists and "additionalProperties" not in schema:
        changed["additionalProperties"] = False
    return changed


def _tags(text: str, config: StructuredOutputsConfig) -> list[llguidance.StructTag]:
    """From vLLM's structural tag, {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or xgrammar's newer
    form, {"format": {"type": "triggered_tags", "triggers", "tags": [{"begin", "content", "end"}]}}.
    """
    tag = json.loads(text)
    form = tag.get("format") if isinstance(tag, dict) else None
    if isinstance(form, dict):
        if form.get("type") != "triggered_tags":
            raise ValueError(f'its format must be "triggered_tags", got {form.get("type")!r}')
        structures = [_structure(x) for x in _typed("tags", form["tags"], list)]
        triggers = form["triggers"]
    elif isinstance(tag, dict):
        structures, triggers = _typed("structures", tag["structures"], list), tag["triggers"]
    else:
        raise ValueError(f"it must be a JSON object, got {text[:200]}")
    triggers = [_typed("a trigger", t, str) for t in _typed("triggers", triggers, list)]
    tags = []
    for s in structures:
        begin = _typed("begin", _typed("a tag", s, dict)["begin"], str)
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"begin={begin!r} starts with none of the triggers {triggers}")
        if not isinstance(s.get("schema"), dict):
            raise ValueError(f"begin={begin!r} has no JSON schema")
        _check_nesting(s["schema"], config.max_nesting)
        end = _typed("end", s["end"], str)
        tags.append(
            llguidance.StructTag(trigger=trigger, begin=begin, grammar=s["schema"], end=end)
        )
    return tags


def _structure(tag: Any) -> dict[str, Any]:
    """xgrammar's newer form of a tag in vLLM's."""
    tag = _typed("a tag", tag, dict)
    content, end = _typed("content", tag.get("content", {}), dict), tag["end"]
    end = end[0] if isinstance(end, list) and end else end
    return {"begin": tag["begin"], "schema": content.get("json_schema"), "end": end}


_TYPE_NAMES = {dict: "an object", list: "a list", str: "a string"}


def _typed(name: str, value: Any, kind: type) -> Any:
    """The value. Raises ValueError if it is of another type."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {_TYPE_NAMES[kind]}, got {value!r:.200}")
    return value


def _path_of_error(
    schema: Any, params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> str:
    """The JSONPath of the error: the smallest part of the schema that is not supported by itself."""
    path = "$"
    definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}

    def fails(part: Any) -> bool:
        if not isinstance(part, dict):
            return False
        return bool(_error(_from_schema({**definitions, **part}, params, config), config))

    while True:
        failing = next(((step, part) for step, part in _parts(schema) if fails(part)), None)
        if failing is None:
            return path
        step, schema = failing
        path += step
        # An error in a definition appears in every part that includes it.
        definitions = {} if step.startswith((".$defs", ".definitions")) else definitions


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """(path step, schema) of each subschema, definitions first."""
    if not isinstance(schema, dict):
        return
    for key in reversed(_MANY):
        parts = schema.get(key)
        if isinstance(parts, dict):
            for name, part in parts.items():
                yield f".{key}.{name}", part
    for key in _LISTS:
        parts = schema.get(key)
        if isinstance(parts, list):
            for i, part in enumerate(parts):
                yield f".{key}[{i}]", part
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield f".{key}", schema[key]
