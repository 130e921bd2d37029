"""`lfm2`: a list of calls with Python's literals between two markers. `test_pythonic.py` has what may be in a list."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import TOOLS, case, check

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
CASES = [
    case("one call", f"{BEGIN}[f(n=1)]{END}", "", ("f", '{"n": 1}')),
    case(
        "two calls",
        f"{BEGIN}[f(n=1, text='x'), g()]{END}",
        "",
        ("f", '{"n": 1, "text": "x"}'),
        ("g", "{}"),
    ),
    case("text around", f"Let me see.{BEGIN}[g()]{END}Done.", "Let me see.Done.", ("g", "{}")),
    case("whitespace", f"{BEGIN} [ g( ) ] \n{END}", "", ("g", "{}")),
    case("two lists", f"{BEGIN}[g()]{END}{BEGIN}[f(n=2)]{END}", "", ("g", "{}"), ("f", '{"n": 2}')),
    case(
        "the marker in a string",
        f"{BEGIN}[f(text='{END}')]{END}",
        "",
        ("f", f'{{"text": "{END}"}}'),
    ),
    case("no end", f"{BEGIN}[g()]", "", ("g", "{}")),
    case("text in place of the end", f"{BEGIN}[g()] then", " then", ("g", "{}")),
    case("a list alone", "[g()]", "[g()]"),
    case("the end alone", f"x{END}", f"x{END}"),
    case("nothing between", f"{BEGIN}{END}", f"{BEGIN}{END}"),
    case("no list", f"{BEGIN}g(){END}", f"{BEGIN}g(){END}"),
    case("JSON", f'{BEGIN}[{{"name": "g"}}]{END}', f'{BEGIN}[{{"name": "g"}}]{END}'),
    case("a bad second call", f"{BEGIN}[g(), 1]{END}", f", 1]{END}", ("g", "{}")),
    case("cut in a string", f"{BEGIN}[f(n=1, text='ab", ", text='ab", ("f", '{"n": 1')),
    case("cut in the marker", "<|tool_call_st", "<|tool_call_st"),
    case("nothing", "", ""),
]


@pytest.mark.parametrize("found", CASES, ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("lfm2", TOOLS), found)
