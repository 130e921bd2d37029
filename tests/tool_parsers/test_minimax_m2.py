"""`minimax_m2`: parameters between tags, several calls between outer tags."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import TOOLS, case, check


def invoke(*parameters: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in parameters)
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def calls(*invokes: str) -> str:
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


BEGIN = '<minimax:tool_call>\n<invoke name="f">\n'
END = "</invoke>\n</minimax:tool_call>"
TEXT, N = '<parameter name="text">', '<parameter name="n">'

CASES = [
    case(
        "one call", calls(invoke(("text", "hi"), ("n", "3"))), "", ("f", '{"text": "hi", "n": 3}')
    ),
    case("no parameters", calls(invoke(name="g")), "", ("g", "{}")),
    case(
        "two calls", calls(invoke(("n", "1")), invoke(name="g")), "", ("f", '{"n": 1}'), ("g", "{}")
    ),
    case(
        "two blocks",
        calls(invoke(("n", "1"))) + "\n" + calls(invoke(name="g")),
        "",
        ("f", '{"n": 1}'),
        ("g", "{}"),
    ),
    case("text around", f"a\n{calls(invoke(('n', '1')))}\nb", "a\n\nb", ("f", '{"n": 1}')),
    case("spaces in a string", calls(invoke(("text", " a\n"))), "", ("f", '{"text": " a\\n"}')),
    case("an empty string", calls(invoke(("text", ""))), "", ("f", '{"text": ""}')),
    case(
        "quotes",
        calls(invoke(("text", 'say "hi" \\ 😀'))),
        "",
        ("f", '{"text": "say \\"hi\\" \\\\ 😀"}'),
    ),
    case(
        "tags in a string",
        calls(
            invoke(("text", '<b> <invoke name="g"> <parameter name="zzz"> </minimax:tool_call>'))
        ),
        "",
        (
            "f",
            '{"text": "<b> <invoke name=\\"g\\"> <parameter name=\\"zzz\\"> </minimax:tool_call>"}',
        ),
    ),
    case(
        "other types",
        calls(
            invoke(
                ("items", "[1, 2]"), ("on", "false"), ("where", '{"city": "Rome"}'), ("x", "2.50")
            )
        ),
        "",
        ("f", '{"items": [1, 2], "on": false, "where": {"city": "Rome"}, "x": 2.5}'),
    ),
    case("no integer", calls(invoke(("n", "much"))), "", ("f", '{"n": "much"}')),
    case(
        "null",
        calls(invoke(("n", "null"), ("maybe", "null"))),
        "",
        ("f", '{"n": null, "maybe": null}'),
    ),
    case("an unknown parameter", calls(invoke(("what", "5"))), "", ("f", '{"what": "5"}')),
    case("an unknown tool", calls(invoke(("n", "5"), name="nobody")), "", ("nobody", '{"n": "5"}')),
    case("no outer tags", "a <invoke name='g'>\n</invoke> b", "a  b", ("g", "{}")),
    case(
        "no quotes",
        "<invoke name=f><parameter name=n>1</parameter></invoke>",
        "",
        ("f", '{"n": 1}'),
    ),
    case("no outer end", BEGIN + "</invoke>\nok", "\nok", ("f", "{}")),
    case(
        "no end of the call",
        f"{BEGIN}{N}1</parameter>\n</minimax:tool_call>c",
        "c",
        ("f", '{"n": 1}'),
    ),
    case(
        "no end of a parameter",
        f"{BEGIN}{TEXT}a{N}1</parameter>\n{END}",
        "",
        ("f", '{"text": "a", "n": 1}'),
    ),
    case("no end of the last", f"{BEGIN}{TEXT}a{END}c", "c", ("f", '{"text": "a"}')),
    case("text in the call", f"{BEGIN}what?{END}", f"\nwhat?{END}", ("f", "{")),
    case(
        "text between calls",
        calls(invoke(name="g"), "and ", invoke(name="g")),
        "\nand ",
        ("g", "{}"),
        ("g", "{}"),
    ),
    case(
        "a marker in prose", "<minimax:tool_call> opens a call", "<minimax:tool_call> opens a call"
    ),
    case("no name", '<invoke name="">', '<invoke name="">'),
    case("quotes that differ", "<invoke name=\"g'>", "<invoke name=\"g'>"),
    case(
        "cut in the name",
        '<minimax:tool_call>\n<invoke name="ge',
        '<minimax:tool_call>\n<invoke name="ge',
    ),
    case("cut behind the name", BEGIN, "", ("f", "{")),
    case("cut in a string", f"{BEGIN}{TEXT}ab</para", "", ("f", '{"text": "ab</para')),
    case("cut in a number", f"{BEGIN}{N}12", f"\n{N}12", ("f", "{")),
    case("cut behind a parameter", f"{BEGIN}{N}1</parameter>\n", "", ("f", '{"n": 1')),
    case("only text", "if a < b: <invoke>", "if a < b: <invoke>"),
    case("nothing", "", ""),
]


@pytest.mark.parametrize("found", CASES, ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("minimax_m2", TOOLS), found)


def test_a_string_comes_while_it_is_written():
    parser = tool_parsers.make("minimax_m2", TOOLS)
    parser.feed(BEGIN + TEXT)
    assert parser.feed("one\n") == [tool_parsers.ToolCallArguments(0, "one\\n")]
    assert parser.feed("</") == []  # may be the closing tag
