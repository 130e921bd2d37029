"""Incremental parsing of Python literals, written as JSON: numbers, strings, lists, dicts and constants.

Nothing is evaluated. Tuples, sets, expressions and string prefixes are rejected; JSON's `true`, `false` and `null` are
accepted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from jaxpage.tool_parsers.json_text import MAX_DEPTH, is_scalar
from jaxpage.tool_parsers.source import SPACE, Reading, Source

_CLOSERS = {"{": "}", "[": "]"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_WORD = re.compile(r"[\w.+-]*")
_PLAIN = re.compile(r"[^\\'\"]*")
_ESCAPE = re.compile(
    r"\\(\r?\n|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL
)
_ESCAPED = {
    **{"\n": "", "\r\n": "", "\\": "\\", "'": "'", '"': '"'},
    **{"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"},
}


def read_literal(source: Source, write: Callable[[str], None]) -> Reading[bool]:
    """Reads a literal and writes each part once it is complete. False at an invalid character, or at the end."""
    closers: list[str] = []
    state = "value"  # what is expected: value, item (or none), colon, next
    comma = ""  # written before the next item, if there is one
    while True:
        if closers:
            yield from source.run(SPACE)
        c = yield from source.peek()
        is_key = state == "item" and closers[-1] == "}"
        if closers and c == closers[-1] and state in ("item", "next"):
            source.pos += 1
            write(closers.pop())
            state, comma = "next", ""
        elif state in ("next", "colon"):
            if c != ("," if state == "next" else ":"):
                return False
            source.pos += 1
            if state == "colon":
                write(": ")
            state, comma = ("item", ", ") if state == "next" else ("value", "")
        elif c in _CLOSERS and not is_key:
            if len(closers) == MAX_DEPTH:
                return False
            source.pos += 1
            closers.append(_CLOSERS[c])
            write(comma + c)
            state, comma = "item", ""
        else:
            scalar = yield from _read_scalar(source)
            if scalar is None:
                return False
            # Keys of JSON are strings.
            write(comma + (json.dumps(scalar) if is_key and scalar[0] != '"' else scalar))
            state, comma = "colon" if is_key else "next", ""
        if state == "next" and not closers:
            return True


def _read_scalar(source: Source) -> Reading[str | None]:
    """A constant, number or string as JSON; None for anything else."""
    c = yield from source.peek()
    if c in ("'", '"'):
        text = yield from _read_string(source)
        return None if text is None else json.dumps(text, ensure_ascii=False)
    word = yield from source.run(_WORD)
    return _CONSTANTS.get(word) or (word if is_scalar(word) else _number(word))


def _number(word: str) -> str | None:
    """Numbers that are valid only in Python, such as `1_000`, `0x1f` and `.5`."""
    for convert in (lambda: int(word, 0), lambda: float(word)):
        try:
            number = convert()
            return json.dumps(number) if math.isfinite(number) else None
        except (ValueError, OverflowError):  # OverflowError: an int out of the range of floats
            continue
    return None


def _read_string(source: Source) -> Reading[str | None]:
    quote = yield from source.peek()
    source.pos += 1
    if (yield from source.match(2 * quote)):
        quote = 3 * quote
    pieces = []
    while True:
        pieces.append((yield from source.run(_PLAIN)))
        if (yield from source.match(quote)):
            return _unescape("".join(pieces))
        for _ in range(2 if (yield from source.peek()) == "\\" else 1):
            c = yield from source.peek()
            if not c:
                return None
            source.pos += 1
            pieces.append(c)


def _unescape(body: str) -> str:
    """Python's escapes. Line breaks may be in any string."""
    if "\\" not in body:
        return body
    text = _ESCAPE.sub(_character, body)
    # JSON escapes a character beyond U+FFFF as a surrogate pair; a lone surrogate is invalid.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(escape: re.Match[str]) -> str:
    code = escape.group(1)
    if code in _ESCAPED:
        return _ESCAPED[code]
    try:
        return chr(int(code, 8) if code.isdigit() else int(code[1:], 16))
    except (ValueError, OverflowError):  # not a valid code point
        return escape.group()
