"""`mistral`: a list of JSON objects, or each call by itself."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import TOOLS, case, check

F = '{"name": "f", "arguments": {"n": 1}}'
G = '{"name": "g", "arguments": {}}'
CALL_F, CALL_G = ("f", '{"n": 1}'), ("g", "{}")

CASES = [
    case("a list", f"[TOOL_CALLS][{F}]", "", CALL_F),
    case("a list of two", f"[TOOL_CALLS][{F}, {G}]", "", CALL_F, CALL_G),
    case("a list over lines", f"[TOOL_CALLS] [\n {F} ,\n {G}\n]\n", "", CALL_F, CALL_G),
    case("text before a list", f"Sure. [TOOL_CALLS][{F}]", "Sure. ", CALL_F),
    case("text after a list", f"[TOOL_CALLS][{F}] ok", " ok", CALL_F),
    case(
        "an id", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}, "id": "abc123xyz"}]', "", CALL_F
    ),
    case("arguments first", '[TOOL_CALLS][{"arguments": {"n": 1}, "name": "f"}]', "", CALL_F),
    case("no arguments", '[TOOL_CALLS][{"name": "g"}]', "", CALL_G),
    case("by itself", '[TOOL_CALLS]f[ARGS]{"n": 1}', "", CALL_F),
    case("without ARGS", '[TOOL_CALLS]f{"n": 1}', "", CALL_F),
    case("with an id", '[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{"n": 1}', "", CALL_F),
    case(
        "two by themselves", '[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[ARGS]{}', "", CALL_F, CALL_G
    ),
    case("two without ARGS", '[TOOL_CALLS]f{"n": 1}[TOOL_CALLS]g{}', "", CALL_F, CALL_G),
    case("spaces", '[TOOL_CALLS] f [ARGS] {"n": 1}\n[TOOL_CALLS] g {} ', "", CALL_F, CALL_G),
    case("text around", 'a [TOOL_CALLS]f{"n": 1} b', "a  b", CALL_F),
    case("both kinds", f"[TOOL_CALLS][{F}][TOOL_CALLS]g{{}}", "", CALL_F, CALL_G),
    case("a dotted name", "[TOOL_CALLS]my-server.tool_1{}", "", ("my-server.tool_1", "{}")),
    case(
        "markers in a string",
        '[TOOL_CALLS]f{"text": "[TOOL_CALLS][ARGS]}"}',
        "",
        ("f", '{"text": "[TOOL_CALLS][ARGS]}"}'),
    ),
    case(
        "brackets in a string",
        '[TOOL_CALLS][{"name": "f", "arguments": {"text": "}]\\""}}]',
        "",
        ("f", '{"text": "}]\\""}'),
    ),
    case("emoji", '[TOOL_CALLS]f{"text": "é😀"}', "", ("f", '{"text": "é😀"}')),
    case("no marker", f"[{F}]", f"[{F}]"),
    case("a part of the marker", "[TOOL_CALL] [TOOL", "[TOOL_CALL] [TOOL"),
    case(
        "marker in prose",
        "It writes [TOOL_CALLS] before a call.",
        "It writes [TOOL_CALLS] before a call.",
    ),
    case("nothing behind the marker", "[TOOL_CALLS]", "[TOOL_CALLS]"),
    case("an empty list", "[TOOL_CALLS][]", "[TOOL_CALLS][]"),
    case("a list of numbers", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]"),
    case("a bad second", f"[TOOL_CALLS][{F}, 1]", ", 1]", CALL_F),
    case("a bad separator", f"[TOOL_CALLS][{F}; {G}]", f"; {G}]", CALL_F),
    case("no closing bracket", f"[TOOL_CALLS][{F}", "", CALL_F),
    case("cut in the second", f"[TOOL_CALLS][{F}, {G[:12]}", f", {G[:12]}", CALL_F),
    case("cut in the arguments", '[TOOL_CALLS]f[ARGS]{"n": [tr', "", ("f", '{"n": [tr')),
    case("cut in the name", "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR"),
    case("arguments are no object", "[TOOL_CALLS]f[ARGS][1]", "[TOOL_CALLS]f[ARGS][1]"),
    case("bad arguments", "[TOOL_CALLS]f{'n': 1}", "'n': 1}", ("f", "{")),
]


@pytest.mark.parametrize("found", CASES, ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("mistral", TOOLS), found)
