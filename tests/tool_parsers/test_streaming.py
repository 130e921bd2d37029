"""What holds for every format: nothing is lost, nothing is taken back, and it comes early and in linear time."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage import tool_parsers
from jaxpage.reasoning import PARSERS
from jaxpage.reasoning_parsers import OutputParser, make_reasoning_parser
from jaxpage.tool_parsers import ToolCallStart, join
from jaxpage.tool_parsers.source import Markers, Source
from tests.tool_parsers.cases import TOOLS, first_pieces, read

FORMATS = sorted(tool_parsers.FORMATS)
REASONING = [f"reasoning of {name}" for name in PARSERS]

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>"),
    *("<parameter=", "<parameter=n>", "<parameter=text>", "</parameter>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "```", "```json", "function"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *(
        "<|tool_call>",
        "<tool_call|>",
        "call:f{",
        '<|"|>',
        "n:",
        "where:{",
        "<|channel>",
        "<channel|>",
        "thought\n",
    ),
    *("<|tool_call_start|>[", "f(n=", "<|tool_call_end|>"),
    *("<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"),
    *("analysis", "final", "commentary", "assistant", " to=functions.f"),
    *(
        '{"name":"f","arguments":',
        '{"name":"f","parameters":',
        '"name"',
        '"arguments"',
        '"parameters"',
    ),
    *(":", ",", ";", "{", "}", "[", "]", "(", ")", '"', "'", '"""', "\\", '\\"', "\\u00"),
    *(
        "true",
        "null",
        "None",
        "1",
        "-0.5e",
        "f",
        "g",
        "[f(",
        "a=",
        "😀",
        "é",
        "<",
        " ",
        "\n",
        "\x00",
    ),
]

outputs = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25)


def make_any(name):
    if name in REASONING:
        return make_reasoning_parser(name.removeprefix("reasoning of "))
    if name == "chained":
        return OutputParser(
            make_reasoning_parser("deepseek_r1"), tool_parsers.make("hermes", TOOLS)
        )
    return tool_parsers.make(name, TOOLS)


@pytest.mark.parametrize("name", [*FORMATS, *REASONING, "chained"])
@settings(max_examples=20, deadline=None)
@given(pieces=outputs, data=st.data())
def test_any_text_can_be_read_and_how_it_is_cut_does_not_matter(name, pieces, data):
    check_any_text(name, pieces, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FORMATS, *REASONING, "chained"])
@settings(max_examples=80, deadline=None)
@given(pieces=outputs, data=st.data())
def test_any_text_can_be_read_in_depth(name, pieces, data):
    check_any_text(name, pieces, data)


def check_any_text(name, pieces, data):
    """Whole, by characters, in these pieces, and in two."""
    output = "".join(pieces)
    deltas = read(make_any(name), [output])
    assert all(isinstance(delta, ToolCallStart) or delta.text for delta in deltas)
    whole = join(deltas)
    assert join(read(make_any(name), output)) == whole
    assert join(read(make_any(name), pieces)) == whole
    at = data.draw(st.integers(0, len(output)))
    assert join(read(make_any(name), [output[:at], output[at:]])) == whole
    if not whole.tool_calls and name in FORMATS:
        assert whole.text == output
    for call in whole.tool_calls:
        assert call.name and call.complete == _is_object(call.arguments)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None)
@given(text=st.text(max_size=60))
def test_text_without_a_call_is_the_text(name, text):
    assert tool_parsers.parse(name, None, text).text == text


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_text_without_a_call_is_the_text_in_depth(name, text):
    assert tool_parsers.parse(name, None, text).text == text


JSON_FORMATS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": ',
    "llama3_json": '{"name": "f", "parameters": ',
    "mistral": "[TOOL_CALLS]f[ARGS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
}


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_arguments_come_with_each_character(name):
    parser = tool_parsers.make(name, TOOLS)
    parser.feed(JSON_FORMATS[name])
    for c in '{"text":"a \\u00e9","items":[{':
        assert parser.feed(c)[-1:] == [tool_parsers.ToolCallArguments(0, c)]


@pytest.mark.parametrize("name", FORMATS)
def test_text_comes_at_once_unless_a_marker_may_begin(name):
    parser = tool_parsers.make(name, TOOLS)
    assert parser.feed("Hello") == [tool_parsers.TextDelta("Hello")]
    assert parser.feed(" world") == [tool_parsers.TextDelta(" world")]


def test_the_beginning_of_a_marker_is_held_back_until_it_is_none():
    parser = tool_parsers.make("hermes", TOOLS)
    assert parser.feed("a <tool") == [tool_parsers.TextDelta("a ")]
    assert parser.feed("_") == []
    assert parser.feed("box>") == [tool_parsers.TextDelta("<tool_box>")]


def test_a_name_comes_before_its_arguments():
    parser = tool_parsers.make("pythonic", TOOLS)
    begun = first_pieces(parser, "[f(n=1, text='abc'), g()]")
    assert begun == {"ToolCallStart": 7, "arguments 0": 7, "arguments 1": 24}


def test_a_call_is_complete_if_its_arguments_are_an_object():
    calls = ["{}", '{"a": 1}', "{", "", "[]", "1" * 5000]
    found = [tool_parsers.ToolCall("f", arguments).complete for arguments in calls]
    assert found == [True, True, False, False, False, False]


@pytest.mark.parametrize("name", FORMATS)
def test_nesting_is_bounded(name):
    deep = {
        **JSON_FORMATS,
        "gemma4": "<|tool_call>call:f",
        "glm45": "<tool_call>f<arg_key>items</arg_key><arg_value>",
        "minimax_m2": '<invoke name="f"><parameter name="items">',
        "pythonic": "[f(a=",
        "lfm2": "<|tool_call_start|>[f(a=",
        "qwen3_coder": "<function=f>\n<parameter=items>",
    }
    for end in ("", "]" * 5000, "]" * 5000 + "</parameter></function>"):
        output = deep[name] + '{"a": ' + "[" * 5000 + end
        assert len(tool_parsers.parse(name, TOOLS, output).tool_calls) == 1


LONG = [
    'BEGIN{"text": "' + "a" * 5000,
    'BEGIN{"text": "' + "\n" * 5000,
    'BEGIN{"n": ' + "1" * 5000,
    'BEGIN{"items": [' + "1," * 2500,
    "BEGIN" + " " * 5000,
    " " * 5000,
    "<" * 5000,
    "{" * 5000,
    '{"' * 2500,
    "[" * 5000,
    "[f(a='" + "\\" * 5000,
    "[f(a=" + "-" * 5000,
    "<|tool_call_start|>" * 300,
    "<|tool_call_start|>[" + "g()," * 1200,
    "<|tool_call>call:f{n:" + "1" * 5000,
    "<|tool_call>call:f{items:[" + "1," * 2500,
    "<|tool_call>call:f{where:" + "{a:" * 1600,
    '<|tool_call>call:f{text:<|"|>' + "<|" * 2500,
    "<tool_call>f<arg_key>text</arg_key><arg_value>" + "</arg_" * 500,
    "<tool_call>f<arg_key>n</arg_key><arg_value>" + "<arg_key>" * 500,
    '<invoke name="f"><parameter name="n">' + "<parameter name=" * 300,
    '<minimax:tool_call><invoke name="' * 200,
    "<function=f><parameter=n>" + "\n<parameter" * 500,
    "<tool_call>" * 500,
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("output", LONG, ids=lambda output: re.sub(r"\s", "_", output[:20]))
def test_each_character_is_looked_at_a_few_times(name, output, monkeypatch):
    """Counts the characters that the source copies, and those in which markers are looked for."""
    seen = 0
    add, find = Source.add, Markers.find

    def counted_add(self, text):
        nonlocal seen
        add(self, text)
        seen += len(self.text)

    def counted_find(self, text, start):
        nonlocal seen
        seen += len(text) - start
        return find(self, text, start)

    monkeypatch.setattr(Source, "add", counted_add)
    monkeypatch.setattr(Markers, "find", counted_find)
    output = output.replace("BEGIN", JSON_FORMATS.get(name, ""))
    read(tool_parsers.make(name, TOOLS), output)
    assert seen <= 2 * 25 * len(output)  # no marker is longer than 25
