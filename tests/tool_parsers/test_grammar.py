"""Grammars that force calls: what they accept is read as calls that fit, and llguidance takes them."""

from __future__ import annotations

import json
import random
from functools import cache

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxpage import tool_parsers
from jaxpage.tool_parsers import tool_grammar
from tests.tool_parsers.cases import TOOLS, tool

FORMATS = sorted(tool_parsers.FORMATS)
MARKERS = sorted({marker for f in tool_parsers.FORMATS.values() for marker in f.markers})
IDS = {marker: 257 + i for i, marker in enumerate(MARKERS)}


class ByteTokenizer:
    """A token for each byte, then one that ends, then the markers as special tokens."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>", *(m.encode() for m in MARKERS)]
    special_token_ids = list(range(256, 257 + len(MARKERS)))

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def tokenizer():
    return LLTokenizer(TokenizerWrapper(ByteTokenizer()))


@cache
def begun(tokenizer, grammar: str) -> LLMatcher:
    """At the beginning of an output; to compile the grammar takes longer than all else."""
    assert LLMatcher.validate_grammar(grammar, tokenizer) == ""
    return LLMatcher(tokenizer, grammar)


def accepts(tokenizer, grammar: str, ids: list[int]) -> bool:
    """Whether `ids` are a whole output of the grammar."""
    matcher = begun(tokenizer, grammar).deep_copy()
    taken = matcher.try_consume_tokens(ids)
    assert not matcher.is_error(), matcher.get_error()
    return taken == len(ids) and matcher.is_accepting()


def named(name: str):
    return {"type": "function", "function": {"name": name}}


def dumps(value) -> str:
    # llguidance writes no escapes for characters that need none.
    return json.dumps(value, ensure_ascii=False)


def as_texts(arguments: dict) -> list[tuple[str, str]]:
    return [(k, v if isinstance(v, str) else dumps(v)) for k, v in arguments.items()]


def as_gemma4(value) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return f"{{{','.join(f'{k}:{as_gemma4(v)}' for k, v in sorted(value.items()))}}}"
        case list():
            return f"[{','.join(map(as_gemma4, value))}]"
    return dumps(value)


def f_and_g(name: str, arguments: dict, *, both: bool) -> str:
    """An output of the format, with a call of f and perhaps one of g without arguments."""
    text = dumps(arguments)
    match name:
        case "hermes":
            begin, between, end = "", "\n", ""
            f = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
            g = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
        case "llama3_json":
            begin, between, end = "", "; ", ""
            f, g = f'{{"name": "f", "parameters": {text}}}', '{"name": "g", "parameters": {}}'
        case "mistral":
            begin, between, end = "[TOOL_CALLS][", ", ", "]"
            f, g = f'{{"name": "f", "arguments": {text}}}', '{"name": "g", "arguments": {}}'
        case "deepseek_v3":
            begin, between, end = "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"
            frame = (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
            )
            f, g = frame % ("f", text), frame % ("g", "{}")
        case "gemma4":
            begin, between, end = "", "", ""
            f = f"<|tool_call>call:f{as_gemma4(arguments)}<tool_call|>"
            g = "<|tool_call>call:g{}<tool_call|>"
        case "glm45":
            begin, between, end = "", "\n", ""
            inner = "".join(
                f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n"
                for k, v in as_texts(arguments)
            )
            f, g = f"<tool_call>f\n{inner}</tool_call>", "<tool_call>g\n</tool_call>"
        case "minimax_m2":
            begin, between, end = "<minimax:tool_call>\n", "", "</minimax:tool_call>"
            inner = "".join(
                f'<parameter name="{k}">{v}</parameter>\n' for k, v in as_texts(arguments)
            )
            f, g = (f'<invoke name="{n}">\n{i}</invoke>\n' for n, i in (("f", inner), ("g", "")))
        case "pythonic" | "lfm2":
            begin, between, end = "[", ", ", "]"
            if name == "lfm2":
                begin, end = "<|tool_call_start|>[", "]<|tool_call_end|>"
            f = f"f({', '.join(f'{k}={dumps(v)}' for k, v in arguments.items())})"
            g = "g()"
        case _:
            begin, between, end = "", "\n", ""
            inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in as_texts(arguments))
            f = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
            g = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
    return begin + (f + between + g if both else f) + end


GOOD = [
    {},
    {"text": 'a "b" \\ {}[]()<x>\n\n', "n": 3},
    {"text": ""},
    {"x": -1.5, "on": True, "items": [1, 2]},
    {"where": {"city": "Zürich 😀"}, "unit": "F"},
    {"maybe": None},
    {"maybe": "no"},
]
BAD = [
    {"n": "three"},
    {"on": 1},
    {"items": [1, "2"]},
    {"where": {}},
    {"unit": "K"},
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arguments", GOOD, ids=str)
def test_arguments_that_fit_can_be_written_and_are_read(tokenizer, name, arguments):
    for both in (False, True):
        output = f_and_g(name, arguments, both=both)
        ids = list(output.encode())
        assert accepts(tokenizer, tool_grammar(name, TOOLS, "required"), ids)
        assert accepts(tokenizer, tool_grammar(name, TOOLS, named("f")), ids) != both
        one = tool_grammar(name, TOOLS, "required", parallel_tool_calls=False)
        assert accepts(tokenizer, one, ids) != both
        assert not accepts(tokenizer, tool_grammar(name, TOOLS, named("g")), ids)
        parsed = tool_parsers.parse(name, TOOLS, output)
        assert parsed.text == ""
        assert [call.name for call in parsed.tool_calls] == (["f", "g"] if both else ["f"])
        assert json.loads(parsed.tool_calls[0].arguments) == arguments


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arguments", BAD, ids=str)
def test_arguments_that_do_not_fit_cannot_be_written(tokenizer, name, arguments):
    ids = list(f_and_g(name, arguments, both=False).encode())
    assert not accepts(tokenizer, tool_grammar(name, TOOLS, "required"), ids)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("output", ["", "Hello", "\n", "{}", "[]", "[g()] "])
def test_no_text_can_be_written_instead_of_a_call(tokenizer, name, output):
    assert not accepts(tokenizer, tool_grammar(name, TOOLS, "required"), list(output.encode()))


@pytest.mark.parametrize("name", FORMATS)
def test_required_arguments_must_be_written(tokenizer, name):
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}
    grammar = tool_grammar(name, [tool("f", properties, required=["b"])], "required")
    for arguments, fits in [
        ({"b": 1}, True),
        ({"a": 1, "b": 2}, True),
        ({"b": 1, "c": 2}, True),
        ({"a": 1, "b": 2, "c": 3}, True),
        ({"a": 1}, False),
        ({"a": 1, "c": 2}, False),
        ({}, False),
    ]:
        output = f_and_g(name, arguments, both=False)
        assert accepts(tokenizer, grammar, list(output.encode())) == fits, arguments


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4", "lfm2", "mistral"])
def test_markers_that_are_special_tokens_are_written_as_these(tokenizer, name):
    markers = [m for m in tool_parsers.FORMATS[name].markers if m not in ("[ARGS]", "[CALL_ID]")]
    special = {marker: IDS[marker] for marker in markers}
    output = f_and_g(name, {"text": "", "n": 1}, both=True)
    ids, rest = [], output
    while rest:
        marker = next((m for m in markers if rest.startswith(m)), None)
        ids += [IDS[marker]] if marker else rest[0].encode()
        rest = rest[len(marker or rest[0]) :]
    grammar = tool_grammar(name, TOOLS, "required", special_tokens=special)
    assert accepts(tokenizer, grammar, ids)
    assert not accepts(tokenizer, grammar, list(output.encode()))


def test_mistral_writes_each_call_by_itself_if_the_tokenizer_has_args(tokenizer):
    special = {marker: IDS[marker] for marker in ("[TOOL_CALLS]", "[ARGS]")}
    grammar = tool_grammar("mistral", TOOLS, "required", special_tokens=special)
    calls, args = IDS["[TOOL_CALLS]"], IDS["[ARGS]"]
    f = [calls, *b"f", args, *b'{"n": 1}']
    assert accepts(tokenizer, grammar, [*f, calls, *b"g", args, *b"{}"])
    assert not accepts(tokenizer, grammar, [*f, *b"\n"])


SCHEMAS = {
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀\n"], ["a", "abcd"]),
    "pattern": ({"type": "string", "pattern": "^[a-z/]+$"}, ["a/b"], ["A", ""]),
    "pattern within": ({"type": "string", "pattern": "b+"}, ["abba"], ["a"]),
    "a constant": ({"const": "x y"}, ["x y"], ["x"]),
    "mixed enumeration": ({"enum": ["a", 2, None]}, ["a", 2, None], ["b", 3]),
    "a list of types": ({"type": ["integer", "null"]}, [3, None], ["a", 1.5]),
    "any of": ({"anyOf": [{"type": "integer"}, {"enum": ["auto"]}]}, [3, "auto"], ["x"]),
    "a reference": ({"$ref": "#/$defs/a"}, [{"b": []}, {"b": [{"b": []}]}], [{"b": 1}, 3]),
    "all of one": (
        {"allOf": [{"$ref": "#/$defs/a"}]},
        [{"b": []}],
        [{"b": 1}],
    ),
    "any object": ({"type": "object"}, [{}, {"a": 1, "b": [{"c": "x"}, None]}], [1]),
    "a map": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{"a": 1, "b": 2}],
        [{"a": "x"}],
    ),
    "a list of bounded length": (
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        [["a"], ["a", "b"]],
        [[], ["a", "b", "c"]],
    ),
    "a bound": ({"type": "integer", "minimum": 0, "maximum": 9}, [0, 9], [-1, 10]),
}


@pytest.mark.parametrize("case", SCHEMAS)
@pytest.mark.parametrize("name", ["gemma4", "glm45", "minimax_m2", "pythonic", "qwen3_coder"])
def test_values_that_are_written_one_by_one_fit_their_schemas(tokenizer, name, case):
    schema, good, bad = SCHEMAS[case]
    a = {"type": "object", "properties": {"b": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    tools = [tool("f", {"v": schema}, **{"$defs": {"a": a}})]
    grammar = tool_grammar(name, tools, named("f"))
    for value in good:
        output = f_and_g(name, {"v": value}, both=False)
        assert accepts(tokenizer, grammar, list(output.encode())), value
        (call,) = tool_parsers.parse(name, tools, output).tool_calls
        assert json.loads(call.arguments) == {"v": value}
        jsonschema.validate(json.loads(call.arguments), tools[0]["function"]["parameters"])
    for value in bad:
        output = f_and_g(name, {"v": value}, both=False)
        assert not accepts(tokenizer, grammar, list(output.encode())), value


LIKELY = set(b'"}]),\n<0123456789aetrufls/pm>= ')
CLOSING = set(b'"}])<')


def written_at_random(tokenizer, grammar: str, seed: int) -> str | None:
    """An output that the grammar allows at each byte; None if it did not come to an end."""
    draw = random.Random(seed)
    matcher = begun(tokenizer, grammar).deep_copy()
    ids: list[int] = []
    while len(ids) < 1500 and not matcher.is_stopped():
        allowed = [i for i, bias in enumerate(matcher.compute_logit_bias()) if bias]
        if ByteTokenizer.eos_token_id in allowed and draw.random() < 0.7:
            break
        likely = LIKELY.intersection(allowed) if draw.random() < 0.9 else set()
        closing = CLOSING.intersection(likely) if draw.random() < 0.5 else set()
        token_id = draw.choice(sorted(closing or likely or allowed))
        if token_id == ByteTokenizer.eos_token_id:
            break
        assert matcher.consume_token(token_id), matcher.get_error()
        ids.append(token_id)
    return bytes(ids).decode() if matcher.is_accepting() else None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_a_grammar_allows_is_read_as_calls_that_fit(tokenizer, name, seed):
    schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in TOOLS}
    output = written_at_random(tokenizer, tool_grammar(name, TOOLS, "required"), seed)
    if output is None:
        return
    parsed = tool_parsers.parse(name, TOOLS, output)
    assert parsed.text == "" and parsed.tool_calls
    for call in parsed.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gemma4", '<|"|>'),
        ("gemma4", "<tool_call|>"),
        ("glm45", "</arg_value>"),
        ("glm45", "</tool_call>"),
        ("minimax_m2", "</parameter>"),
        ("minimax_m2", '<parameter name="text">'),
        ("minimax_m2", "</invoke>"),
        ("qwen3_coder", "</parameter>"),
        ("qwen3_coder", "<parameter=text>"),
        ("qwen3_coder", "</function>\n</tool_call>"),
    ],
)
def test_a_string_cannot_hold_what_would_end_it(tokenizer, name, end):
    grammar = tool_grammar(name, TOOLS, "required")
    good, bad = (f_and_g(name, {"text": t}, both=False) for t in ("x<y", f"x{end}y"))
    assert accepts(tokenizer, grammar, list(good.encode()))
    assert not accepts(tokenizer, grammar, list(bad.encode()))


def test_line_breaks_between_the_tags_of_glm_are_free(tokenizer):
    grammar = tool_grammar("glm45", TOOLS, "required")
    call = "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"
    for output in (call, f"\n{call}", f"{call}{call}", f"{call}\n{call}"):
        assert accepts(tokenizer, grammar, list(output.encode()))
    assert not accepts(tokenizer, grammar, list(f"{call}\n\n{call}".encode()))


@pytest.mark.parametrize(
    ("name", "tools", "choice", "message"),
    [
        ("hermes", TOOLS, named("h"), "names the tool 'h', the request's tools are: f, g"),
        ("hermes", TOOLS, "auto", 'tool_choice must be "required" or'),
        ("hermes", TOOLS, named(None), "tool_choice must be"),
        ("hermes", [], "required", "the request has none"),
        ("nobody", TOOLS, "required", "'nobody' is not known"),
        ("hermes", [tool("f", {"a": {"type": "thing"}})], "required", "tool 'f' cannot be forced"),
        ("pythonic", [tool("f-g", {})], "required", "'f-g' of tool 'f-g' is no identifier"),
        ("pythonic", [tool("f", {"a b": {}})], "required", "'a b' of tool 'f' is no identifier"),
        ("gemma4", [tool("f", {"a:": {}})], "required", "'a:' of tool 'f' cannot be written"),
        (
            "gemma4",
            [tool("f", {"a": {"allOf": [{"type": "string"}, {"minLength": 1}]}})],
            "required",
            "allOf in parameters of tool 'f' cannot be forced",
        ),
        (
            "glm45",
            [tool("f", {"a<": {}})],
            "required",
            "'a<' of tool 'f' cannot be written as glm45",
        ),
        (
            "minimax_m2",
            [tool("f", {'a"': {}})],
            "required",
            "of tool 'f' cannot be written as mini",
        ),
        ("qwen3_coder", [tool("f", {"a>": {}})], "required", "'a>' of tool 'f' cannot be written"),
    ],
)
def test_what_cannot_be_forced_is_refused(name, tools, choice, message):
    with pytest.raises(ValueError, match=message):
        tool_grammar(name, tools, choice)
