"""`pythonic`: a list of calls with Python's literals."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import TOOLS, case, check

CASES = [
    case("one call", "[f(n=1)]", "", ("f", '{"n": 1}')),
    case("two calls", '[f(n=1, text="x"), g()]', "", ("f", '{"n": 1, "text": "x"}'), ("g", "{}")),
    case("no arguments", "[g()]", "", ("g", "{}")),
    case(
        "whitespace",
        "\n[ f( n = 1 ,\n text = 'x' ) , g( ) ]\n",
        "",
        ("f", '{"n": 1, "text": "x"}'),
        ("g", "{}"),
    ),
    case("trailing commas", "[f(n=1,), g(),]", "", ("f", '{"n": 1}'), ("g", "{}")),
    case("unknown tool", "[nobody(n=1)]", "", ("nobody", '{"n": 1}')),
    case(
        "Python's constants",
        "[f(a=True, b=False, c=None)]",
        "",
        ("f", '{"a": true, "b": false, "c": null}'),
    ),
    case(
        "JSON's constants",
        "[f(a=true, b=false, c=null)]",
        "",
        ("f", '{"a": true, "b": false, "c": null}'),
    ),
    case(
        "numbers",
        "[f(a=-1, b=0.5, c=1e-3, d=0)]",
        "",
        ("f", '{"a": -1, "b": 0.5, "c": 1e-3, "d": 0}'),
    ),
    case(
        "Python's numbers",
        "[f(a=1_000, b=.5, c=0x1F, d=+2, e=1.)]",
        "",
        ("f", '{"a": 1000, "b": 0.5, "c": 31, "d": 2, "e": 1.0}'),
    ),
    case("a long number", f"[f(n={'9' * 5000})]", "", ("f", f'{{"n": {"9" * 5000}}}')),
    case("lists", "[f(items=[1, [2, []], 3,])]", "", ("f", '{"items": [1, [2, []], 3]}')),
    case(
        "dicts",
        "[f(where={'city': {'a': [1]}, \"b\": {}})]",
        "",
        ("f", '{"where": {"city": {"a": [1]}, "b": {}}}'),
    ),
    case(
        "keys that are no strings",
        "[f(a={1: 2, None: 3, True: 4})]",
        "",
        ("f", '{"a": {"1": 2, "null": 3, "true": 4}}'),
    ),
    case(
        "both quotes",
        """[f(a="it's", b='say "hi"')]""",
        "",
        ("f", '{"a": "it\'s", "b": "say \\"hi\\""}'),
    ),
    case(
        "triple quotes",
        '[f(a="""x "y"\nz""", b=\'\'\'w\'\'\')]',
        "",
        ("f", '{"a": "x \\"y\\"\\nz", "b": "w"}'),
    ),
    case("empty strings", "[f(a=\"\", b='')]", "", ("f", '{"a": "", "b": ""}')),
    case(
        "escapes",
        r"[f(a='\n\t\\\'\"\x41\101\u00e9\0')]",
        "",
        ("f", r'{"a": "\n\t\\' + '\'\\"AAé\\u0000"}'),
    ),
    case("unknown escapes", r"[f(a='\d\/\N{DASH}')]", "", ("f", r'{"a": "\\d\\/\\N{DASH}"}')),
    case("too large an escape", r"[f(a='\UFFFFFFFF')]", "", ("f", r'{"a": "\\UFFFFFFFF"}')),
    case("surrogate pair", r"[f(a='\ud83d\ude00')]", "", ("f", '{"a": "😀"}')),
    case("a surrogate alone", r"[f(a='\ud83dx')]", "", ("f", '{"a": "\ufffdx"}')),
    case("a continued line", "[f(a='x\\\ny')]", "", ("f", '{"a": "xy"}')),
    case("a raw break", "[f(a='x\ny')]", "", ("f", '{"a": "x\\ny"}')),
    case("emoji", "[f(a='👩‍👩‍👧‍👦 日本')]", "", ("f", '{"a": "👩‍👩‍👧‍👦 日本"}')),
    case("brackets in a string", "[f(a=')], g(')]", "", ("f", '{"a": ")], g("}')),
    case("text after", "[g()] done", " done", ("g", "{}")),
    case("text before", "Call [g()]", "Call [g()]"),
    case("a Markdown list", "[a link](http://x) and [x]", "[a link](http://x) and [x]"),
    case("a list of numbers", "[1, 2]", "[1, 2]"),
    case("an empty list", "[]", "[]"),
    case("positional arguments", "[f(1)]", "[f(1)]"),
    case("a comparison", "[f(n==1)]", "[f(n==1)]"),
    case("a call as a value", "[f(n=g())]", "[f(n=g())]"),
    case("an attribute", "[os.system(n=1)]", "[os.system(n=1)]"),
    case("an expression", "[f(n=1+1)]", "[f(n=1+1)]"),
    case("a bad second argument", "[f(n=1, x=y)]", ", x=y)]", ("f", '{"n": 1')),
    case("a bad item", "[f(items=[1, y])]", ", y])]", ("f", '{"items": [1')),
    case("a bad second call", "[g(), 1]", ", 1]", ("g", "{}")),
    case("a tuple", "[f(items=(1, 2))]", "[f(items=(1, 2))]"),
    case("a key that is a list", "[f(a={[1]: 2})]", "[1]: 2})]", ("f", '{"a": {')),
    case("not a number", "[f(x=nan)]", "[f(x=nan)]"),
    case("cut in the name", "[get_wea", "[get_wea"),
    case("cut in a string", "[f(n=1, text='ab", ", text='ab", ("f", '{"n": 1')),
    case("cut behind a call", "[f(n=1), ", ", ", ("f", '{"n": 1}')),
    case("cut behind a bracket", "[f(n=1)", "", ("f", '{"n": 1}')),
    case("nothing", "", ""),
]


@pytest.mark.parametrize("found", [c for c in CASES if len(c.output) < 1000], ids=str)
def test_an_output_says_what_it_says_however_it_is_cut(found):
    check(lambda: tool_parsers.make("pythonic", TOOLS), found)


@pytest.mark.parametrize("found", [c for c in CASES if len(c.output) >= 1000], ids=str)
def test_a_long_output_says_what_it_says(found):
    assert tool_parsers.parse("pythonic", TOOLS, found.output) == found.expected
