"""`gemma4`: calls in its own notation. What is expected is vLLM's, but for values of which the schema says nothing."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import TOOLS, case, check, tool

Q = '<|"|>'


def call(arguments: str, name: str = "f") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


CASES = [
    case("one call", call(f"text:{Q}hi{Q},n:3"), "", ("f", '{"text": "hi", "n": 3}')),
    case("no arguments", call("", "g"), "", ("g", "{}")),
    case("two calls", call("n:1") + call("", "g"), "", ("f", '{"n": 1}'), ("g", "{}")),
    case("text around", f"a\n{call('n:1')}\nb", "a\n\nb", ("f", '{"n": 1}')),
    case(
        "anything in a string",
        call(f'text:{Q}say "hi" \\ {{}}[],: <b>\n{Q}'),
        "",
        ("f", '{"text": "say \\"hi\\" \\\\ {}[],: <b>\\n"}'),
    ),
    case("an empty string", call(f"text:{Q}{Q}"), "", ("f", '{"text": ""}')),
    case("emoji", call(f"text:{Q}é日本😀{Q}"), "", ("f", '{"text": "é日本😀"}')),
    case(
        "an object",
        call(f"where:{{city:{Q}Rome{Q},at:{{n:1}}}},n:2"),
        "",
        ("f", '{"where": {"city": "Rome", "at": {"n": 1}}, "n": 2}'),
    ),
    case("a list", call("items:[1,2]"), "", ("f", '{"items": [1, 2]}')),
    case(
        "values that do not fit their types",
        call(f"items:[1,{Q}2{Q},{Q}x{Q}],n:{Q}7{Q},text:5,on:1,x:2.50"),
        "",
        ("f", '{"items": [1, 2, "x"], "n": 7, "text": "5", "on": true, "x": 2.5}'),
    ),
    case(
        "constants",
        call("on:false,maybe:null,n:null"),
        "",
        ("f", '{"on": false, "maybe": null, "n": null}'),
    ),
    case("a bare string", call("text:Rome, n:5"), "", ("f", '{"text": "Rome", "n": 5}')),
    case("spaces", call(f" text : {Q}a{Q} ,\n n : 5 "), "", ("f", '{"text": "a", "n": 5}')),
    case("a key in delimiters", call(f"{Q}text{Q}:{Q}a{Q}"), "", ("f", '{"text": "a"}')),
    case(
        "unknown parameters",
        call(f"a:5,b:{Q}5{Q},c:true,d:x y,e:[1.50,{{f:null}}]"),
        "",
        ("f", '{"a": 5, "b": "5", "c": true, "d": "x y", "e": [1.50, {"f": null}]}'),
    ),
    case("an unknown tool", call(f"n:{Q}5{Q}", "nobody"), "", ("nobody", '{"n": "5"}')),
    case("no call", "<|tool_call>:g{}<tool_call|>", "", ("g", "{}")),
    case("parentheses", "<|tool_call>call:f(n:3)<tool_call|>", "", ("f", '{"n": 3}')),
    case("no end marker", "<|tool_call>call:g{} b", " b", ("g", "{}")),
    case("no brace", "<|tool_call>call:f{n:3<tool_call|>", "", ("f", '{"n": 3}')),
    case(
        "nothing but the end marker",
        f"<|tool_call>call:f{{where:{{city:{Q}R<tool_call|>b",
        "b",
        ("f", '{"where": {"city": "R"}}'),
    ),
    case("a marker in prose", "<|tool_call> opens a call", "<|tool_call> opens a call"),
    case("no name", "<|tool_call>call:{}<tool_call|>", "<|tool_call>call:{}<tool_call|>"),
    case("no value", call("n:"), "n:}<tool_call|>", ("f", "{")),
    case("no key", call("n:1,:2"), ",:2}<tool_call|>", ("f", '{"n": 1')),
    case("an end that does not fit", call("items:[1}"), "}}<tool_call|>", ("f", '{"items": [1')),
    case("cut in the name", "<|tool_call>call:get", "<|tool_call>call:get"),
    case("cut behind the name", "<|tool_call>call:f{", "", ("f", "{")),
    case("cut in a string", f"<|tool_call>call:f{{text:{Q}ab", "", ("f", '{"text": "ab')),
    case(
        "cut in a delimiter", f'<|tool_call>call:f{{text:{Q}ab<|"', "", ("f", '{"text": "ab<|\\"')
    ),
    case("cut in a number", "<|tool_call>call:f{n:12", "n:12", ("f", "{")),
    case(
        "cut in an object",
        "<|tool_call>call:f{where:{n:1,",
        ",",
        ("f", '{"where": {"n": 1'),
    ),
    case("only text", "a < b <|tool> {", "a < b <|tool> {"),
    case("nothing", "", ""),
]


@pytest.mark.parametrize("found", CASES, ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("gemma4", TOOLS), found)


def test_a_string_comes_while_it_is_written():
    parser = tool_parsers.make("gemma4", TOOLS)
    parser.feed(f"<|tool_call>call:f{{where:{{city:{Q}")
    assert parser.feed("one\ntwo") == [tool_parsers.ToolCallArguments(0, "one\\ntwo")]
    assert parser.feed("<|") == []  # may be the delimiter


def test_inner_values_are_converted_by_their_schemas():
    place = {"type": "object", "properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}}
    tools = [
        tool(
            "f",
            {
                "a": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
                "b": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
                "c": {"type": "object", "additionalProperties": {"type": "integer"}},
            },
            **{"$defs": {"Place": place}},
        )
    ]
    inner = f"{{zip:12345,n:{Q}5{Q}}}"
    (found,) = tool_parsers.parse(
        "gemma4", tools, call(f"a:{inner},b:[{inner}],c:{inner}")
    ).tool_calls
    assert found.arguments == (
        '{"a": {"zip": "12345", "n": 5}, "b": [{"zip": "12345", "n": 5}], "c": {"zip": 12345, "n": 5}}'
    )
