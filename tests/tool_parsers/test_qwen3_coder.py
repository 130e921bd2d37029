"""`qwen3_coder`: parameters between tags, converted by the tool's schema."""

from __future__ import annotations

import json

import pytest

from jaxpage import tool_parsers
from jaxpage.tool_parsers.values import schema_types, to_json
from tests.tool_parsers.cases import TOOLS, case, check


def call(*parameters: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


BEGIN = "<tool_call>\n<function=f>\n"

CASES = [
    case("one call", call(("text", "hi")), "", ("f", '{"text": "hi"}')),
    case("no parameters", call(name="g"), "", ("g", "{}")),
    case("two calls", call(("n", "1")) + "\n" + call(name="g"), "", ("f", '{"n": 1}'), ("g", "{}")),
    case("text around", "a\n" + call(("n", "1")) + "\nb", "a\n\nb", ("f", '{"n": 1}')),
    case("two parameters", call(("n", "1"), ("text", "x")), "", ("f", '{"n": 1, "text": "x"}')),
    case("lines in a string", call(("text", "a\n\n  b\n")), "", ("f", '{"text": "a\\n\\n  b\\n"}')),
    case("a line break before", call(("text", "\na")), "", ("f", '{"text": "\\na"}')),
    case("an empty string", call(("text", "")), "", ("f", '{"text": ""}')),
    case(
        "one line",
        "<tool_call><function=f><parameter=text>a b</parameter><parameter=n>2</parameter></function></tool_call>",
        "",
        ("f", '{"text": "a b", "n": 2}'),
    ),
    case(
        "quotes", call(("text", 'say "hi" \\ \t')), "", ("f", '{"text": "say \\"hi\\" \\\\ \\t"}')
    ),
    case("emoji", call(("text", "é日本😀")), "", ("f", '{"text": "é日本😀"}')),
    case(
        "a string that is JSON", call(("text", '{"a": 1}')), "", ("f", '{"text": "{\\"a\\": 1}"}')
    ),
    case("a string that is null", call(("text", "null")), "", ("f", '{"text": "null"}')),
    case(
        "tags in a string",
        call(("text", "<b> </function> <parameter=zzz> </tool_call> <tool_call>")),
        "",
        ("f", '{"text": "<b> </function> <parameter=zzz> </tool_call> <tool_call>"}'),
    ),
    case("an integer", call(("n", "-12")), "", ("f", '{"n": -12}')),
    case("no integer", call(("n", "1.5")), "", ("f", '{"n": 1.5}')),
    case("a number", call(("x", "2.50")), "", ("f", '{"x": 2.5}')),
    case("Python's number", call(("x", ".5")), "", ("f", '{"x": 0.5}')),
    case("no number", call(("x", "much")), "", ("f", '{"x": "much"}')),
    case("booleans", call(("on", "True"), ("on", "false")), "", ("f", '{"on": true, "on": false}')),
    case("no boolean", call(("on", "yes")), "", ("f", '{"on": "yes"}')),
    case("a list", call(("items", "[1, 2]")), "", ("f", '{"items": [1, 2]}')),
    case("Python's list", call(("items", "[1, None,]")), "", ("f", '{"items": [1, null]}')),
    case("no list", call(("items", "1, 2")), "", ("f", '{"items": "1, 2"}')),
    case(
        "an object", call(("where", '{"city": "Rome"}')), "", ("f", '{"where": {"city": "Rome"}}')
    ),
    case(
        "Python's object",
        call(("where", "{'city': 'Rome'}")),
        "",
        ("f", '{"where": {"city": "Rome"}}'),
    ),
    case("a broken object", call(("where", '{"city": ')), "", ("f", '{"where": "{\\"city\\": "}')),
    case("an enumeration", call(("unit", "C")), "", ("f", '{"unit": "C"}')),
    case("null for a string or null", call(("maybe", "null")), "", ("f", '{"maybe": null}')),
    case("Python's None for a string", call(("maybe", "None")), "", ("f", '{"maybe": "None"}')),
    case(
        "a string for a string or null",
        call(("maybe", "none of it")),
        "",
        ("f", '{"maybe": "none of it"}'),
    ),
    case("null for a number", call(("n", "null")), "", ("f", '{"n": null}')),
    case("an unknown parameter", call(("what", "5")), "", ("f", '{"what": "5"}')),
    case("an unknown tool", call(("n", "5"), name="nobody"), "", ("nobody", '{"n": "5"}')),
    case("no outer tag", "<function=g>\n</function>", "", ("g", "{}")),
    case("no outer end", call(name="g").removesuffix("</tool_call>") + "ok", "\nok", ("g", "{}")),
    case("no end of the function", "<tool_call>\n<function=g>\n</tool_call>", "", ("g", "{}")),
    case(
        "no end of a parameter",
        BEGIN + "<parameter=text>\na\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        ("f", '{"text": "a", "n": 1}'),
    ),
    case(
        "no end of the last",
        BEGIN + "<parameter=text>\na\n</function>\n</tool_call> b",
        " b",
        ("f", '{"text": "a"}'),
    ),
    case(
        "the same parameter in a string",
        call(("text", "<parameter=text>")),
        "",
        ("f", '{"text": "<parameter=text>"}'),
    ),
    case("only text", "if a < b: <function>", "if a < b: <function>"),
    case("a marker in prose", "<tool_call> opens a call", "<tool_call> opens a call"),
    case(
        "a hermes call",
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "f"}\n</tool_call>',
    ),
    case("no name", "<tool_call>\n<function=>", "<tool_call>\n<function=>"),
    case("text in the function", BEGIN + "what?\n</function>", "\nwhat?\n</function>", ("f", "{")),
    case("cut in the name", "<tool_call>\n<function=get", "<tool_call>\n<function=get"),
    case("cut behind the name", BEGIN, "", ("f", "{")),
    case("cut in a string", BEGIN + "<parameter=text>\nab", "", ("f", '{"text": "ab')),
    case("cut in a number", BEGIN + "<parameter=n>\n12", "\n<parameter=n>\n12", ("f", "{")),
    case("cut behind a parameter", call(("n", "1")).split("</function>")[0], "", ("f", '{"n": 1')),
    case("nothing", "", ""),
]


@pytest.mark.parametrize("found", CASES, ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("qwen3_coder", TOOLS), found)


def test_a_string_comes_while_it_is_written():
    parser = tool_parsers.make("qwen3_coder", TOOLS)
    parser.feed(BEGIN + "<parameter=text>\n")
    assert parser.feed("one\ntwo") == [tool_parsers.ToolCallArguments(0, "one\\ntwo")]
    assert parser.feed("\n") == []  # may be the line break before the closing tag


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, ("integer",)),
        ({"type": ["string", "null"]}, ("string", "null")),
        ({"enum": ["a", 1, None]}, ("integer", "null", "string")),
        ({"const": True}, ("boolean",)),
        ({"anyOf": [{"type": "integer"}, {"enum": ["auto"]}]}, ("integer", "string")),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"oneOf": [{"type": "array"}]}}}, ("array",)),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, ("string",)),
        ({"$ref": "elsewhere.json"}, ("string",)),
        ({}, ("string",)),
        (True, ("string",)),
        (None, ("string",)),
    ],
)
def test_types_are_those_that_the_schema_allows(schema, types):
    assert schema_types(schema) == types


@pytest.mark.parametrize(
    "text", ["", " ", "nul", "-", "1e999", "[", "{}{}", "'", "\\", "\x00", "NaN"]
)
@pytest.mark.parametrize("type_", ["integer", "number", "boolean", "array", "object", "date"])
def test_what_does_not_fit_its_type_is_a_string(text, type_):
    assert json.loads(to_json(text, (type_,))) == text


@pytest.mark.parametrize(
    ("text", "type_", "value"),
    [
        ("3.14", "float", 3.14),
        ("2.0", "integer", 2.0),
        ("007", "int", 7),
        ("5.0", "number", 5),
        ("12345678901234567890", "number", 12345678901234567890),
        ("1", "bool", True),
        ("0", "boolean", False),
        ("5", ["string", "integer"], 5),
        ("five", ["string", "integer"], "five"),
        ("NULL", ["string", "null"], None),
        ("None", ["string", "null"], "None"),
        ("None", "integer", None),
        ("5", "date", 5),
        ("[1e999]", "array", "[1e999]"),
        ("{'a': None}", "dict", {"a": None}),
        ("12", "str", "12"),
    ],
)
def test_values_are_read_as_vllm_reads_them(text, type_, value):
    found = json.loads(to_json(text, schema_types({"type": type_})))
    assert found == value and type(found) is type(value)
