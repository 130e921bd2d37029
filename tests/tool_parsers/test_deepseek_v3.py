"""`deepseek_v3`: JSON in code blocks."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import TOOLS, case, check

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def call(arguments: str, name: str = "f") -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def calls(*parts: str) -> str:
    return BEGIN + "\n".join(parts) + END


CASES = [
    case("one call", calls(call('{"n": 1}')), "", ("f", '{"n": 1}')),
    case("two calls", calls(call('{"n": 1}'), call("{}", "g")), "", ("f", '{"n": 1}'), ("g", "{}")),
    case("no break between", calls(call("{}") + call("{}", "g")), "", ("f", "{}"), ("g", "{}")),
    case("text before", "Let me see." + calls(call("{}")), "Let me see.", ("f", "{}")),
    case("text after", calls(call("{}")) + "Done", "Done", ("f", "{}")),
    case("over lines", calls(call('{\n  "n": 1\n}')), "", ("f", '{\n  "n": 1\n}')),
    case(
        "compact",
        f'{BEGIN}{CALL}function{SEPARATOR}f```json{{"n":1}}```{CALL_END}{END}',
        "",
        ("f", '{"n":1}'),
    ),
    case("no outer markers", call("{}"), "", ("f", "{}")),
    case("no outer end", BEGIN + call("{}"), "", ("f", "{}")),
    case("no end of the call", f"{BEGIN}{call('{}').removesuffix(CALL_END)}", "", ("f", "{}")),
    case("twice", calls(call("{}")) + calls(call("{}", "g")), "", ("f", "{}"), ("g", "{}")),
    case("unknown tool", calls(call("{}", "nobody")), "", ("nobody", "{}")),
    case(
        "code block in a string",
        calls(call('{"text": "```py\\n```"}')),
        "",
        ("f", '{"text": "```py\\n```"}'),
    ),
    case(
        "markers in a string",
        calls(call(f'{{"text": "{END}{CALL}"}}')),
        "",
        ("f", f'{{"text": "{END}{CALL}"}}'),
    ),
    case(
        "a raw break in a string", calls(call('{"text": "a\nb"}')), "", ("f", '{"text": "a\\nb"}')
    ),
    case("emoji", calls(call('{"text": "日本😀"}')), "", ("f", '{"text": "日本😀"}')),
    case("only text", "A ｜ is no bar, < neither.", "A ｜ is no bar, < neither."),
    case("marker in prose", f"{BEGIN} begins calls", f"{BEGIN} begins calls"),
    case("no calls", BEGIN + END, BEGIN + END),
    case(
        "no separator",
        f"{BEGIN}{CALL}f\n```json\n{{}}\n```{END}",
        f"{BEGIN}{CALL}f\n```json\n{{}}\n```{END}",
    ),
    case(
        "no code block",
        f"{BEGIN}{CALL}function{SEPARATOR}f\n{{}}{CALL_END}",
        f"{BEGIN}{CALL}function{SEPARATOR}f\n{{}}{CALL_END}",
    ),
    case("no JSON", calls(call("n=1")), calls(call("n=1"))),
    case("bad arguments", calls(call("{n}")), f"n}}\n```{CALL_END}{END}", ("f", "{")),
    case("a bad second", calls(call("{}"), call("1")), f"\n{call('1')}{END}", ("f", "{}")),
    case("unclosed block", f"{BEGIN}{CALL}function{SEPARATOR}f\n```json\n{{}}\n", "", ("f", "{}")),
    case(
        "cut in the arguments",
        f'{BEGIN}{CALL}function{SEPARATOR}f\n```json\n{{"text": "a',
        "",
        ("f", '{"text": "a'),
    ),
    case("cut in a marker", "a" + BEGIN[:9], "a" + BEGIN[:9]),
]


@pytest.mark.parametrize("found", CASES, ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("deepseek_v3", TOOLS), found)
