"""Incremental parsing of JSON: values, and objects that are calls.

Strict like `json.loads`, with one exception: raw control characters in strings, which models write in code, are
escaped. Values nested deeper than MAX_DEPTH are rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from jaxpage.tool_parsers.source import SPACE, Reading, Source, read_whole
from jaxpage.tool_parsers.writer import Writer

Write = Callable[[str], None]

MAX_DEPTH = 200  # json.loads allows about a thousand

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_CHARACTERS = re.compile(r"[A-Za-z0-9+.-]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}


def is_scalar(text: str) -> bool:
    """Whether a text is a number, true, false or null."""
    return _SCALAR.fullmatch(text) is not None


def read_json(source: Source, write: Write) -> Reading[bool]:
    """Reads a value and writes it piece by piece. False at an invalid character, which is not read, or at the end."""
    closers: list[str] = []
    state = "value"  # what is expected: value, key, colon, first (of an object or array), next
    while True:
        if closers:
            write((yield from source.run(SPACE)))
        c = yield from source.peek()
        if closers and c == closers[-1] and state in ("first", "next"):
            _read(source, c, write)
            closers.pop()
            state = "next"
        elif state == "next":
            if c != ",":
                return False
            _read(source, c, write)
            state = "key" if closers[-1] == "}" else "value"
        elif state == "colon":
            if c != ":":
                return False
            _read(source, c, write)
            state = "value"
        elif closers and closers[-1] == "}" and state in ("first", "key"):
            if not (yield from _read_string(source, write)):
                return False
            state = "colon"
        elif c in _CLOSERS:
            if len(closers) == MAX_DEPTH:
                return False
            _read(source, c, write)
            closers.append(_CLOSERS[c])
            state = "first"
        elif (yield from (_read_string if c == '"' else _read_scalar)(source, write)):
            state = "next"
        else:
            return False
        if state == "next" and not closers:
            return True


def _read(source: Source, c: str, write: Write) -> None:
    source.pos += 1
    write(c)


def _read_string(source: Source, write: Write) -> Reading[bool]:
    if (yield from source.peek()) != '"':
        return False
    _read(source, '"', write)
    while (yield from source.more()):
        plain = _PLAIN.match(source.text, source.pos)
        if plain and plain.group():
            source.pos = plain.end()
            write(plain.group())
            continue
        c = source.text[source.pos]
        if c == "\\":
            if not (yield from _read_escape(source, write)):
                return False
            continue
        _read(source, c if c == '"' else json.dumps(c)[1:-1], write)
        if c == '"':
            return True
    return False


def _read_escape(source: Source, write: Write) -> Reading[bool]:
    _read(source, "\\", write)
    c = yield from source.peek()
    if not c or c not in '"\\/bfnrtu':
        return False
    _read(source, c, write)
    for _ in range(4 if c == "u" else 0):
        digit = yield from source.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            return False
        _read(source, digit, write)
    return True


def _read_scalar(source: Source, write: Write) -> Reading[bool]:
    text = yield from source.run(_SCALAR_CHARACTERS)
    write(text)
    return is_scalar(text)


def read_arguments(source: Source, writer: Writer, name: str) -> Reading[bool]:
    """Reads the arguments of a call, an object. False if there is none, or if it is cut off.

    The call begins with the object. Then held text is dropped, and after the object the source holds again.
    """
    if (yield from source.peek()) != "{":
        return False
    writer.start(name)
    source.take_held()
    complete = yield from read_json(source, writer.arguments)
    source.hold()
    return complete


@dataclass
class _Call:
    """What is known so far about an object that may be a call."""

    name: str | None = None
    early: list[str] | None = None  # arguments that came before the name
    begun: bool = False


def read_call(
    source: Source, writer: Writer, argument_keys: tuple[str, ...], *, needs_arguments: bool
) -> Reading[bool]:
    """Reads an object with "name" and one of `argument_keys`; other keys are skipped.

    Arguments are an object, or a string with the JSON of one.

    The call begins once its name and the beginning of its arguments are known; then held text is dropped. False if the
    object is not a call, or is cut off: then the source holds text that is not part of a call.
    """
    call = _Call()
    separator = yield from source.match("{")
    while separator in ("{", ","):
        key = yield from _read_key(source)
        kind = "arguments" if key in argument_keys else key
        if key is None or not (yield from _read_member(source, writer, call, kind)):
            return False
        yield from source.run(SPACE)
        separator = yield from source.match(",", "}")
    if separator != "}" or not call.name or (needs_arguments and not call.begun):
        return False
    if not call.begun:
        _write_call(source, writer, call.name, "{}")
    source.hold()
    return True


def _read_member(source: Source, writer: Writer, call: _Call, key: str | None) -> Reading[bool]:
    if key == "name" and call.name is None:
        call.name = yield from _read_text(source)
        if call.name and call.early is not None:
            call.begun = True
            _write_call(source, writer, call.name, "".join(call.early))
        return bool(call.name)
    if key == "arguments" and call.early is None and not call.begun:
        if (yield from source.peek()) == '"':
            return (yield from _read_quoted(source, writer, call))
        if call.name is not None:
            call.begun = True
            return (yield from read_arguments(source, writer, call.name))
        call.early = []
        is_object = (yield from source.peek()) == "{"
        return is_object and (yield from read_json(source, call.early.append))
    return (yield from read_json(source, lambda _: None))


def _read_quoted(source: Source, writer: Writer, call: _Call) -> Reading[bool]:
    """Arguments whose JSON is in a string. False if it is not an object."""
    text = ((yield from _read_text(source)) or "").strip()
    pieces: list[str] = []
    complete, rest = read_whole(text, lambda inner: read_json(inner, pieces.append))
    if not (complete and not rest and text.startswith("{")):
        return False
    if call.name is None:
        call.early = pieces
    else:
        call.begun = True
        _write_call(source, writer, call.name, "".join(pieces))
    return True


def _write_call(source: Source, writer: Writer, name: str, arguments: str) -> None:
    writer.start(name)
    writer.arguments(arguments)
    source.hold()


def _read_key(source: Source) -> Reading[str | None]:
    """A key and its colon, with the whitespace around them."""
    yield from source.run(SPACE)
    key = yield from _read_text(source)
    yield from source.run(SPACE)
    if key is None or not (yield from source.match(":")):
        return None
    yield from source.run(SPACE)
    return key


def _read_text(source: Source) -> Reading[str | None]:
    pieces: list[str] = []
    complete = yield from _read_string(source, pieces.append)
    return json.loads("".join(pieces)) if complete else None
