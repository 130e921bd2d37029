"""`llama3_json`: bare JSON objects."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import TOOLS, case, check


def call(parameters: str, name: str = "f") -> str:
    return f'{{"name": "{name}", "parameters": {parameters}}}'


CASES = [
    case("one call", call('{"n": 1}'), "", ("f", '{"n": 1}')),
    case("tag", "<|python_tag|>" + call('{"n": 1}'), "", ("f", '{"n": 1}')),
    case("tag and a break", "<|python_tag|>\n" + call("{}"), "", ("f", "{}")),
    case("two calls", call("{}") + "; " + call("{}", "g"), "", ("f", "{}"), ("g", "{}")),
    case("a list", f"[{call('{}')}, {call('{}', 'g')}]", "", ("f", "{}"), ("g", "{}")),
    case("a list in text", f"So: [{call('{}')}] ok", "So:  ok", ("f", "{}")),
    case(
        "a list and text", f"[{call('{}')},\n{call('{}')}\n] [1]", " [1]", ("f", "{}"), ("f", "{}")
    ),
    case(
        "semicolons in a list", f"[{call('{}')}; {call('{}')}] ok", " ok", ("f", "{}"), ("f", "{}")
    ),
    case("two lists", f"[{call('{}')}], [{call('{}', 'g')}]", "", ("f", "{}"), ("g", "{}")),
    case("tag and a list", f"<|python_tag|>[{call('{}')}]", "", ("f", "{}")),
    case(
        "tags and lists",
        f"<|python_tag|> [ {call('{}')}, {call('{}', 'g')} ];<|python_tag|>[{call('{}')}] ok",
        " ok",
        ("f", "{}"),
        ("g", "{}"),
        ("f", "{}"),
    ),
    case("tag and another list", "<|python_tag|>[1, {}] ok", "<|python_tag|>[1, {}] ok"),
    case("a list with a number", f"[{call('{}')}, 5] ok", ", 5] ok", ("f", "{}")),
    case("a list that is cut", f"[{call('{}')}, ", "", ("f", "{}")),
    case("a list cut in a call", f'[{call("{}")}, {{"name": "g"', ', {"name": "g"', ("f", "{}")),
    case("another list", "[1, 2] [ {} ]", "[1, 2] [ {} ]"),
    case("arguments as a string", call(r'"{\"n\": 1}"'), "", ("f", '{"n": 1}')),
    case("no separator", call("{}") + call("{}", "g"), "", ("f", "{}"), ("g", "{}")),
    case("lines", call("{}") + "\n" + call("{}", "g") + ";\n", "", ("f", "{}"), ("g", "{}")),
    case(
        "tag before each",
        f"<|python_tag|>{call('{}')};<|python_tag|>{call('{}', 'g')}",
        "",
        ("f", "{}"),
        ("g", "{}"),
    ),
    case("called arguments", '{"name": "f", "arguments": {"n": 1}}', "", ("f", '{"n": 1}')),
    case(
        "the first of both",
        '{"name": "f", "parameters": {}, "arguments": {"n": 1}}',
        "",
        ("f", "{}"),
    ),
    case(
        "a type", '{"type": "function", "name": "f", "parameters": {"n": 1}}', "", ("f", '{"n": 1}')
    ),
    case("parameters first", '{"parameters": {"n": 1}, "name": "f"}', "", ("f", '{"n": 1}')),
    case("text before", "I call it: " + call("{}"), "I call it: ", ("f", "{}")),
    case("text after", call("{}") + " That was it.", " That was it.", ("f", "{}")),
    case("a semicolon in text", "a; b; " + call("{}"), "a; b; ", ("f", "{}")),
    case("text begins with a semicolon", call("{}") + "; then", "; then", ("f", "{}")),
    case("whitespace before", "\n\n" + call("{}"), "", ("f", "{}")),
    case("unknown tool", call("{}", "nobody"), "", ("nobody", "{}")),
    case(
        "nested",
        call('{"a": {"name": "x", "parameters": {}}}'),
        "",
        ("f", '{"a": {"name": "x", "parameters": {}}}'),
    ),
    case("braces in a string", call('{"text": "}; {"}'), "", ("f", '{"text": "}; {"}')),
    case(
        "tag in a string",
        call('{"text": "<|python_tag|>"}'),
        "",
        ("f", '{"text": "<|python_tag|>"}'),
    ),
    case("emoji", call('{"text": "😀\\ud83d\\ude00"}'), "", ("f", '{"text": "😀\\ud83d\\ude00"}')),
    case("code for the interpreter", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    case("other JSON", '{"city": "Paris", "n": [1, {}]}', '{"city": "Paris", "n": [1, {}]}'),
    case("a name only", '{"name": "Ada"}', '{"name": "Ada"}'),
    case("a call within other JSON", '{"a": ' + call("{}") + "}", '{"a": ' + call("{}") + "}"),
    case("code", "void f() { return; } {}", "void f() { return; } {}"),
    case("a brace before", "{" + call("{}"), "{", ("f", "{}")),
    case("cut before the parameters", '{"name": "f", "par', '{"name": "f", "par'),
    case("cut in the parameters", '{"name": "f", "parameters": {"n": 1', "", ("f", '{"n": 1')),
    case(
        "cut behind a number", '{"name": "f", "parameters": {"n": [1, 2', "", ("f", '{"n": [1, 2')
    ),
    case("parameters are no object", call("null"), call("null")),
    case("the beginning of the tag", "<|python", "<|python"),
    case("nothing", "", ""),
]


@pytest.mark.parametrize("found", CASES, ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("llama3_json", TOOLS), found)
