"""Schemas, regexes and grammars with, for each, what says whether an output matches it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema

NAMES = ("name", "age", "tags", "address", "is_active", "score", "größe", "a b", "x-y", "items")
PATTERNS = ("[a-z]{2,5}", "[A-Z][a-z]+", "\\d{3}-\\d{2}", "(foo|bar)+", '[^"\\\\]{0,4}')


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of the features that llguidance has."""
    scalars = ("string", "integer", "number", "boolean", "null", "enum", "const", "pattern")
    nested = ("object", "object", "array", "tuple", "anyOf", "ref")
    kind = rng.choice(scalars if depth > 2 else (*scalars, *nested, *nested))
    if depth == 0:
        kind = rng.choice(("object", "object", "object", "array", "anyOf", "enum"))
    return _MAKERS[kind](rng, depth + 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    if rng.random() < 0.8:
        made["additionalProperties"] = False
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": schema(rng, depth),
        "minItems": low,
        "maxItems": low + rng.randint(0, 3),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, depth) for _ in range(rng.randint(2, 3))]}


def _ref(rng: random.Random, depth: int) -> dict[str, Any]:
    part = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
    part["additionalProperties"] = False
    return {
        "type": "object",
        "$defs": {"part": part},
        "properties": {"first": {"$ref": "#/$defs/part"}, "second": {"$ref": "#/$defs/part"}},
        "required": ["first"],
        "additionalProperties": False,
    }


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(("date", "time", "uuid", "ipv4"))}
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": rng.randint(-5, 0), "exclusiveMaximum": rng.randint(1, 99)}


_MAKERS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "object": _object,
    "array": _array,
    "tuple": _tuple,
    "anyOf": _any_of,
    "ref": lambda rng, depth: _ref(rng, depth) if depth == 1 else _object(rng, depth),
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda rng, depth: {"type": "boolean"},
    "null": lambda rng, depth: {"type": "null"},
    "enum": lambda rng, depth: {"enum": rng.sample(["red", "green", 7, None, True, "ü"], 3)},
    "const": lambda rng, depth: {"const": rng.choice(["fixed", 12, False])},
    "pattern": lambda rng, depth: {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"},
}

SCHEMAS = [schema(random.Random(seed)) for seed in range(220)]


def fits(text: str, wanted: dict[str, Any]) -> bool:
    checker = jsonschema.Draft202012Validator(wanted, format_checker=jsonschema.FormatChecker())
    return checker.is_valid(json.loads(text))


_ATOMS = ("[a-c]", "\\d", "x", "(ab|cd)", "[^\\s]", "é", "\\w", "(1|22|333)", "[A-Z][a-z]", "-")
_COUNTS = ("", "+", "{2}", "{1,3}", "?", "{0,5}")


def _regex(rng: random.Random) -> str:
    parts = [rng.choice(_ATOMS) + rng.choice(_COUNTS) for _ in range(rng.randint(1, 5))]
    text = "".join(parts)
    return rng.choice((text, f"({text}|{rng.choice(_ATOMS)})", f"q{text}"))


REGEXES = [_regex(random.Random(seed)) for seed in range(64)]


def _is_balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += 1 if letter == "(" else -1
        if depth < 0:
            return False
    return depth == 0 and bool(text)


def _by_regex(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.S) is not None


def _is_sum(text: str) -> bool:
    return re.fullmatch(r"[\d+*()]+", text) is not None and isinstance(eval(text), int)


def _is_list(text: str) -> bool:
    return isinstance(json.loads(text), list)


_EXPRESSION = """start: term ("+" term)*
term: factor ("*" factor)*
factor: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
# (grammar, whether a text matches)
GRAMMARS: list[tuple[str, Callable[[str], bool]]] = [
    ('start: "yes" | "no"', _by_regex("yes|no")),
    ('start: "a"+', _by_regex("a+")),
    ('start: pair+\npair: "(" pair* ")"', _is_balanced),
    (_EXPRESSION, _is_sum),
    ('start: WORD (" " WORD)*\nWORD: /[a-z]{1,4}/', _by_regex("[a-z]{1,4}( [a-z]{1,4})*")),
    ('start: "[" [NUM ("," NUM)*] "]"\nNUM: /[0-9]{1,2}/', _by_regex(r"\[(\d{1,2}(,\d{1,2})*)?\]")),
    ('start: a b\na: "x" | "y"\nb: "1" | "2"', _by_regex("[xy][12]")),
    ("start: DATE\nDATE: /20[0-9]{2}-[01][0-9]/", _by_regex(r"20\d\d-[01]\d")),
    ('start: "if " NAME ":" "\\n  pass"\nNAME: /[a-z_]+/', _by_regex(r"if [a-z_]+:\n  pass")),
    ('start: item ~ 3\nitem: "a" | "bc"', _by_regex("(a|bc){3}")),
    ('start: "<b>" TEXT "</b>"\nTEXT: /[^<>]{1,9}/', _by_regex("<b>[^<>]{1,9}</b>")),
    ('start: value\nvalue: "[" value "]" | "0"', lambda t: t.strip("[]") == "0"),
    (
        'start: "SELECT " COL " FROM " COL\nCOL: /[a-z]{1,6}/',
        _by_regex("SELECT [a-z]{1,6} FROM [a-z]{1,6}"),
    ),
    ('start: %json {"type": "array", "items": {"type": "integer"}, "maxItems": 4}', _is_list),
    ('start: "é" | "日本" | "🙂"', _by_regex("é|日本|🙂")),
    (
        'start: KEY "=" VAL\nKEY: /[a-z]+/\nVAL: /"[^"\\n]{0,6}"/',
        _by_regex(r'[a-z]+="[^"\n]{0,6}"'),
    ),
    ('root ::= "go" | "stop" tail\ntail ::= [0-9]+\n', _by_regex(r"go|stop\d+")),
    ('root ::= item ("," item)*\nitem ::= [a-c]\n', _by_regex("[a-c](,[a-c])*")),
    ('start: "-"? INT ("." INT)?\nINT: /[0-9]{1,3}/', _by_regex(r"-?\d{1,3}(\.\d{1,3})?")),
    ('start: "(" ("a" | "b") ")" | "[" ("a" | "b") "]"', _by_regex(r"\([ab]\)|\[[ab]\]")),
]
