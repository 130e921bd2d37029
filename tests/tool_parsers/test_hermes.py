"""`hermes`: JSON objects between tags."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import TOOLS, case, check


def wrapped(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


def call(arguments: str, name: str = "f") -> str:
    return wrapped(f'{{"name": "{name}", "arguments": {arguments}}}')


CASES = [
    case("one call", call('{"n": 1}'), "", ("f", '{"n": 1}')),
    case("text before", "I will look.\n" + call('{"n": 1}'), "I will look.\n", ("f", '{"n": 1}')),
    case("text after", call('{"n": 1}') + "\n\nDone.", "\n\nDone.", ("f", '{"n": 1}')),
    case("whitespace around", f"\n\n{call('{}')}\n\n", "", ("f", "{}")),
    case(
        "two calls", call('{"n": 1}') + "\n" + call("{}", "g"), "", ("f", '{"n": 1}'), ("g", "{}")
    ),
    case("calls without a break", call("{}") + call("{}"), "", ("f", "{}"), ("f", "{}")),
    case("text between", call("{}") + " and " + call("{}", "g"), " and ", ("f", "{}"), ("g", "{}")),
    case(
        "no line breaks",
        '<tool_call>{"name":"f","arguments":{"n":1}}</tool_call>',
        "",
        ("f", '{"n":1}'),
    ),
    case(
        "much whitespace",
        wrapped('{ "name" : "f" ,\n "arguments" : { "n" : 1 } }'),
        "",
        ("f", '{ "n" : 1 }'),
    ),
    case("empty arguments", call("{}"), "", ("f", "{}")),
    case("no arguments", wrapped('{"name": "g"}'), "", ("g", "{}")),
    case("unknown tool", call('{"n": 1}', "nobody"), "", ("nobody", '{"n": 1}')),
    case("wrong types", call('{"n": "one", "on": 3}'), "", ("f", '{"n": "one", "on": 3}')),
    case("arguments first", wrapped('{"arguments": {"n": 1}, "name": "f"}'), "", ("f", '{"n": 1}')),
    case(
        "further keys",
        wrapped('{"id": [1, {"name": "x"}], "name": "f", "arguments": {}, "z": null}'),
        "",
        ("f", "{}"),
    ),
    case("escaped key", wrapped('{"n\\u0061me": "f", "arguments": {}}'), "", ("f", "{}")),
    case(
        "the first name counts",
        wrapped('{"name": "f", "name": "g", "arguments": {}}'),
        "",
        ("f", "{}"),
    ),
    case(
        "the first arguments count",
        wrapped('{"name": "f", "arguments": {}, "arguments": {"n": 1}}'),
        "",
        ("f", "{}"),
    ),
    case(
        "nested",
        call('{"where": {"a": [{"b": {}}, []]}}'),
        "",
        ("f", '{"where": {"a": [{"b": {}}, []]}}'),
    ),
    case(
        "numbers", call('{"x": [-0.5e+3, 0, 12, 1E5]}'), "", ("f", '{"x": [-0.5e+3, 0, 12, 1E5]}')
    ),
    case("literals", call('{"a": [true, false, null]}'), "", ("f", '{"a": [true, false, null]}')),
    case("braces in a string", call('{"text": "}}{{]["}'), "", ("f", '{"text": "}}{{]["}')),
    case(
        "quotes in a string",
        call('{"text": "a \\"b\\" \\\\"}'),
        "",
        ("f", '{"text": "a \\"b\\" \\\\"}'),
    ),
    case(
        "escapes",
        call(r'{"text": "\n\t\/\b\f\r\u00e9"}'),
        "",
        ("f", r'{"text": "\n\t\/\b\f\r\u00e9"}'),
    ),
    case(
        "surrogate pair", call(r'{"text": "\ud83d\ude00"}'), "", ("f", r'{"text": "\ud83d\ude00"}')
    ),
    case(
        "emoji",
        "👋 " + call('{"text": "👩‍👩‍👧‍👦 日本語"}'),
        "👋 ",
        ("f", '{"text": "👩‍👩‍👧‍👦 日本語"}'),
    ),
    case(
        "markers in a string",
        call('{"text": "</tool_call><tool_call>"}'),
        "",
        ("f", '{"text": "</tool_call><tool_call>"}'),
    ),
    case(
        "control characters",
        call('{"text": "a\n\tb\x00"}'),
        "",
        ("f", '{"text": "a\\n\\tb\\u0000"}'),
    ),
    case("no end marker", '<tool_call>\n{"name": "f", "arguments": {}}', "", ("f", "{}")),
    case(
        "no end marker but a call",
        '<tool_call>{"name": "f", "arguments": {}}\n' + call("{}", "g"),
        "",
        ("f", "{}"),
        ("g", "{}"),
    ),
    case(
        "a brace too many",
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        "}</tool_call>",
        ("f", "{}"),
    ),
    case(
        "a brace too few",
        '<tool_call>{"name": "f", "arguments": {}</tool_call>',
        "</tool_call>",
        ("f", "{}"),
    ),
    case("only text", "Hello, 1 < 2, <tool> </tool_call>", "Hello, 1 < 2, <tool> </tool_call>"),
    case("nothing", "", ""),
    case("only whitespace", " \n ", " \n "),
    case("the beginning of a marker", "a <tool_ca", "a <tool_ca"),
    case(
        "marker in prose",
        "The tag <tool_call> begins a call.",
        "The tag <tool_call> begins a call.",
    ),
    case("marker twice", "<tool_call>\n" + call("{}"), "<tool_call>\n", ("f", "{}")),
    case("no JSON", wrapped("f(1)"), wrapped("f(1)")),
    case("empty", wrapped(""), wrapped("")),
    case("empty object", wrapped("{}"), wrapped("{}")),
    case("an array", wrapped("[1]"), wrapped("[1]")),
    case("no name", wrapped('{"arguments": {"n": 1}}'), wrapped('{"arguments": {"n": 1}}')),
    case(
        "empty name",
        wrapped('{"name": "", "arguments": {}}'),
        wrapped('{"name": "", "arguments": {}}'),
    ),
    case(
        "name is no string",
        wrapped('{"name": 1, "arguments": {}}'),
        wrapped('{"name": 1, "arguments": {}}'),
    ),
    case("arguments are no object", call("[1]"), call("[1]")),
    case("arguments as a string", call(r'"{\"n\": 1}"'), "", ("f", '{"n": 1}')),
    case(
        "a string of arguments first",
        wrapped(r'{"arguments": "{\"n\": 1}", "name": "f"}'),
        "",
        ("f", '{"n": 1}'),
    ),
    case("a string that is no object", call('"[1]"'), call('"[1]"')),
    case("a string of broken JSON", call(r'"{\"n\": "'), call(r'"{\"n\": "')),
    case(
        "called parameters", wrapped('{"name": "f", "parameters": {"n": 1}}'), "", ("f", '{"n": 1}')
    ),
    case("single quotes", wrapped("{'name': 'f'}"), wrapped("{'name': 'f'}")),
    case("text after a failure", wrapped("oops") + call("{}"), wrapped("oops"), ("f", "{}")),
    case("cut in the name", '<tool_call>\n{"name": "get_w', '<tool_call>\n{"name": "get_w'),
    case(
        "cut after the name", '<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu'
    ),
    case(
        "cut in the arguments",
        '<tool_call>\n{"name": "f", "arguments": {"text": "ab',
        "",
        ("f", '{"text": "ab'),
    ),
    case(
        "cut in an escape",
        '<tool_call>\n{"name": "f", "arguments": {"text": "\\u00',
        "",
        ("f", '{"text": "\\u00'),
    ),
    case("bad arguments", call("{n: 1}"), "n: 1}}\n</tool_call>", ("f", "{")),
    case("bad literal", call('{"on": True}'), "}}\n</tool_call>", ("f", '{"on": True')),
    case("bad escape", call(r'{"text": "\d"}'), 'd"}}\n</tool_call>', ("f", '{"text": "\\')),
    case("trailing comma", call('{"n": 1,}'), "}}\n</tool_call>", ("f", '{"n": 1,')),
    case("bad number", call('{"n": 01}'), "}}\n</tool_call>", ("f", '{"n": 01')),
]


@pytest.mark.parametrize("found", CASES, ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("hermes", TOOLS), found)
