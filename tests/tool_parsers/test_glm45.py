"""`glm45`: keys and values between tags, converted by the tool's schema."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import TOOLS, case, check


def call(*pairs: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in pairs)
    return f"<tool_call>{name}\n{inner}</tool_call>"


BEGIN = "<tool_call>f\n"
TEXT = "<arg_key>text</arg_key>\n<arg_value>"
N = "<arg_key>n</arg_key>\n<arg_value>"

CASES = [
    case("one call", call(("text", "hi"), ("n", "3")), "", ("f", '{"text": "hi", "n": 3}')),
    case("no arguments", call(name="g"), "", ("g", "{}")),
    case("two calls", call(("n", "1")) + "\n" + call(name="g"), "", ("f", '{"n": 1}'), ("g", "{}")),
    case(
        "no line breaks",
        call(("n", "1"), ("on", "True")).replace("\n", ""),
        "",
        ("f", '{"n": 1, "on": true}'),
    ),
    case("only a name", "a<tool_call>g</tool_call>b", "ab", ("g", "{}")),
    case("a line break before the name", "<tool_call>\nf\n</tool_call>", "", ("f", "{}")),
    case("text around", f"a\n{call(('n', '1'))}\nb", "a\n\nb", ("f", '{"n": 1}')),
    case("spaces in a string", call(("text", " a\n")), "", ("f", '{"text": " a\\n"}')),
    case("an empty string", call(("text", "")), "", ("f", '{"text": ""}')),
    case("quotes", call(("text", 'say "hi" \\ 😀')), "", ("f", '{"text": "say \\"hi\\" \\\\ 😀"}')),
    case(
        "tags in a string",
        call(("text", "<b> <arg_key>n</arg_key><arg_value> <tool_call>")),
        "",
        ("f", '{"text": "<b> <arg_key>n</arg_key><arg_value> <tool_call>"}'),
    ),
    case("a list", call(("items", "[1, 2]")), "", ("f", '{"items": [1, 2]}')),
    case(
        "an object", call(("where", '{"city": "Rome"}')), "", ("f", '{"where": {"city": "Rome"}}')
    ),
    case("a broken object", call(("where", '{"city": ')), "", ("f", '{"where": "{\\"city\\": "}')),
    case("no integer", call(("n", "much")), "", ("f", '{"n": "much"}')),
    case("null", call(("n", "null"), ("maybe", "null")), "", ("f", '{"n": null, "maybe": null}')),
    case("an unknown parameter", call(("what", "5")), "", ("f", '{"what": "5"}')),
    case("an unknown tool", call(("n", "5"), name="nobody"), "", ("nobody", '{"n": "5"}')),
    case("no end of a string", f"{BEGIN}{TEXT}ab</tool_call>c", "c", ("f", '{"text": "ab"}')),
    case("no end of a number", f"{BEGIN}{N}12</tool_call>c", "c", ("f", '{"n": 12}')),
    case(
        "no value",
        f"{BEGIN}<arg_key>n</arg_key></tool_call>",
        "<arg_key>n</arg_key></tool_call>",
        ("f", "{"),
    ),
    case("text in the call", f"{BEGIN}{N}1</arg_value> what?", " what?", ("f", '{"n": 1')),
    case("no key at first", "<tool_call>f what?</tool_call>", "", ("f what?", "{}")),
    case("a marker in prose", "<tool_call> opens a call", "<tool_call> opens a call"),
    case("no name", "<tool_call></tool_call>", "<tool_call></tool_call>"),
    case(
        "a hermes call",
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "f"}\n</tool_call>',
    ),
    case("cut in the name", "<tool_call>get", "<tool_call>get"),
    case("cut behind the name", BEGIN, BEGIN),
    case("cut in a key", f"{BEGIN}<arg_key>te", "<arg_key>te", ("f", "{")),
    case("cut in a string", f"{BEGIN}{TEXT}ab</arg", "", ("f", '{"text": "ab</arg')),
    case("cut in a number", f"{BEGIN}{N}12", f"{N}12", ("f", "{")),
    case("cut behind a pair", f"{BEGIN}{N}1</arg_value>\n", "", ("f", '{"n": 1')),
    case("only text", "if a < b: <tool>", "if a < b: <tool>"),
    case("nothing", "", ""),
]


@pytest.mark.parametrize("found", CASES, ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("glm45", TOOLS), found)


def test_a_string_comes_while_it_is_written():
    parser = tool_parsers.make("glm47", TOOLS)
    parser.feed(BEGIN + TEXT)
    assert parser.feed("one\n") == [tool_parsers.ToolCallArguments(0, "one\\n")]
    assert parser.feed("</") == []  # may be the closing tag
