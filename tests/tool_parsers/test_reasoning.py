"""Reasoning in text, and reasoning followed by calls."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from jaxpage.reasoning_parsers import (
    OutputParser,
    make_reasoning_parser,
    starts_in_reasoning,
)
from tests.tool_parsers.cases import TOOLS, case, check

THINKING = [
    case("with both marks", "<think>\na\n</think>\n\nb", "\n\nb", reasoning="\na\n"),
    case("whitespace before", "\n<think>a</think>b", "b", reasoning="a"),
    case("no end", "<think>a </thin", "", reasoning="a </thin"),
    case("no reasoning", "a</think>b", "a</think>b"),
    case(
        "a mark in the text",
        "<think>a</think>b <think>c</think>",
        "b <think>c</think>",
        reasoning="a",
    ),
    case("empty", "<think>\n\n</think>\n\nb", "\n\nb", reasoning="\n\n"),
    case("not quite", " <thinking> a", " <thinking> a"),
    case(
        "a call at once",
        "<think>a<tool_call>\n<function=f>",
        "<tool_call>\n<function=f>",
        reasoning="a",
    ),
    case(
        "a call is mentioned", "<think>a <tool_call> b</think>c", "c", reasoning="a <tool_call> b"
    ),
    case("emoji", "<think>😀</think>é", "é", reasoning="😀"),
    case("nothing", "", ""),
    case("whitespace", " \n", " \n"),
]

INSIDE = [
    case("only the end", "a\n</think>\n\nb", "\n\nb", reasoning="a\n"),
    case("both marks", "<think>a</think>b", "b", reasoning="a"),
    case("no end", " a < b", "", reasoning=" a < b"),
    case("ends at once", "</think>b", "b"),
    case("two ends", "a</think>b</think>", "b</think>", reasoning="a"),
    case("nothing", "", ""),
]

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

HARMONY = [
    case("both channels", f"{ANALYSIS}a{NEXT}{FINAL}b<|return|>", "b", reasoning="a"),
    case("only an answer", f"{FINAL}b", "b"),
    case(
        "a call", f'{ANALYSIS}a{NEXT}{TO_F}{{"n": 1}}<|call|>', "", ("f", '{"n": 1}'), reasoning="a"
    ),
    case("a call whose end is not shown", f'{TO_F}{{"n": 1}}', "", ("f", '{"n": 1}')),
    case(
        "the recipient in the role",
        " to=functions.f<|channel|>commentary<|message|>{}<|call|>",
        "",
        ("f", "{}"),
    ),
    case(
        "the recipient in a later role",
        f"{ANALYSIS}a<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{}}",
        "",
        ("f", "{}"),
        reasoning="a",
    ),
    case(
        "a preamble",
        f"<|channel|>commentary<|message|>I will call.{NEXT}{TO_F}{{}}",
        "I will call.",
        ("f", "{}"),
    ),
    case(
        "two calls",
        f"{TO_F}{{}}<|call|><|start|>assistant{TO_F}{{}}<|call|>",
        "",
        ("f", "{}"),
        ("f", "{}"),
    ),
    case("two analyses", f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "c", reasoning="a\nb"),
    case(
        "another tool",
        f"<|channel|>commentary to=python code<|message|>1+1<|end|><|start|>assistant{FINAL}2",
        "2",
        reasoning="1+1",
    ),
    case("a format", "<|channel|>final <|constrain|>json<|message|>{}", "{}"),
    case("no end before the next", f"{ANALYSIS}a<|start|>assistant{FINAL}b", "b", reasoning="a"),
    case("no marks", "plain <text>", "plain <text>"),
    case(
        "cut in a header",
        f"{ANALYSIS}a{NEXT}<|channel|>fin",
        "<|start|>assistant<|channel|>fin",
        reasoning="a",
    ),
    case("a header without a message", "<|channel|>final<|end|>x", "<|channel|>final<|end|>x"),
    case("no arguments", f"{TO_F}<|call|>", f"{TO_F}<|call|>"),
    case("bad arguments", f"{TO_F}{{n}}<|call|>", "n}<|call|>", ("f", "{")),
    case("cut in the arguments", f'{TO_F}{{"text": "a', "", ("f", '{"text": "a')),
    case(
        "marks in a string",
        f'{TO_F}{{"text": "<|call|>"}}<|call|>',
        "",
        ("f", '{"text": "<|call|>"}'),
    ),
    case("text after a call", f"{TO_F}{{}}<|call|> x", " x", ("f", "{}")),
    case("nothing", "", ""),
]

GLM = [
    case("a line break before", "\n<think>a</think>\nb", "\nb", reasoning="a"),
    case("no reasoning", "a</think>b", "a</think>b"),
    case("a call at once", "<think>a<tool_call>g", "<tool_call>g", reasoning="a"),
    case("not quite a call", "<think>a<tool_cal", "", reasoning="a<tool_cal"),
]

MINIMAX = [
    case("only the end", "a\n</think>\n\nb", "\n\nb", reasoning="a\n"),
    case("both marks", "<think>a</think>b", "b", reasoning="a"),
    case("no end", "ab", "", reasoning="ab"),
    case("a call at once", "a<minimax:tool_call>\n", "<minimax:tool_call>\n", reasoning="a"),
    case("another call", "a<tool_call></think>b", "b", reasoning="a<tool_call>"),
]

GEMMA = [
    case("a channel", "<|channel>thought\na\n<channel|>b", "b", reasoning="a\n"),
    case("no reasoning", "b", "b"),
    case("an empty channel", "<|channel>thought\n<channel|>b", "b"),
    case("only its name", "<|channel>thought<channel|>b", "b"),
    case("another name", "<|channel>thoughts\n<channel|>b", "b", reasoning="thoughts\n"),
    case("whitespace before", " <|channel>thought\na<channel|>b", " b", reasoning="a"),
    case("after text", "x<|channel>thought\na<channel|>b", "xb", reasoning="a"),
    case(
        "two channels",
        "<|channel>a<channel|>b<|channel>thought\nc<channel|>d",
        "bd",
        reasoning="ac",
    ),
    case("a mark twice", "<|channel><|channel>thought\na<channel|><channel|>b", "b", reasoning="a"),
    case(
        "a call at once",
        "<|channel>thought\na<|tool_call>call:g{}<tool_call|>",
        "<|tool_call>call:g{}<tool_call|>",
        reasoning="a",
    ),
    case("cut in the name", "<|channel>thou", "", reasoning="thou"),
    case("cut in the end", "<|channel>thought\na<chan", "", reasoning="a<chan"),
    case("nothing", "", ""),
]

HERMES = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'

CHAINED = [
    case(
        "reasoning, text, call",
        f"<think>\na</think>\n\nb {HERMES}",
        "\n\nb ",
        ("f", "{}"),
        reasoning="\na",
    ),
    case("reasoning and call", f"<think>\na</think>\n\n{HERMES}", "", ("f", "{}"), reasoning="\na"),
    case("a call in reasoning", f"<think>{HERMES}</think>b", "b", reasoning=HERMES),
    case("no reasoning", HERMES, "", ("f", "{}")),
    case("only text", "\n b", "\n b"),
    case("nothing", "", ""),
]


@pytest.mark.parametrize("found", THINKING, ids=str)
def test_qwen3(found):
    check(lambda: make_reasoning_parser("qwen3"), found)


@pytest.mark.parametrize("found", INSIDE, ids=str)
@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_an_output_may_begin_within_reasoning(name, found):
    check(lambda: make_reasoning_parser(name, starts_in_reasoning=name == "qwen3"), found)


@pytest.mark.parametrize("found", GLM, ids=str)
@pytest.mark.parametrize("name", ["glm45", "glm47"])
def test_glm45(name, found):
    check(lambda: make_reasoning_parser(name), found)


@pytest.mark.parametrize("found", MINIMAX, ids=str)
def test_minimax_m2(found):
    check(lambda: make_reasoning_parser("minimax_m2"), found)


@pytest.mark.parametrize("found", GEMMA, ids=str)
def test_gemma4(found):
    check(lambda: make_reasoning_parser("gemma4"), found)


def test_gemma4_may_begin_within_a_channel():
    def make():
        return make_reasoning_parser("gemma4", starts_in_reasoning=True)

    check(make, case("without its name", "a<channel|>b", "b", reasoning="a"))
    check(make, case("with its name", "thought\na<channel|>b", "b", reasoning="a"))


@pytest.mark.parametrize("found", HARMONY, ids=str)
def test_gpt_oss(found):
    check(lambda: make_reasoning_parser("gpt_oss"), found)


@pytest.mark.parametrize("found", CHAINED, ids=str)
def test_calls_are_read_behind_the_reasoning(found):
    def make():
        return OutputParser(make_reasoning_parser("qwen3"), tool_parsers.make("hermes", TOOLS))

    check(make, found)


@pytest.mark.parametrize(
    ("name", "reasoning", "call"),
    [
        ("gemma4", "<|channel>thought\na<channel|>", "<|tool_call>call:g{}<tool_call|>"),
        ("gemma4", "<|channel>thought\na", "<|tool_call>call:g{}<tool_call|>"),
        ("glm45", "\n<think>a</think>", "\n<tool_call>g\n</tool_call>"),
        ("glm45", "<think>a", "<tool_call>g</tool_call>"),
        (
            "minimax_m2",
            "a</think>\n\n",
            '<minimax:tool_call>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        ),
        ("minimax_m2", "a", '<minimax:tool_call><invoke name="g"></invoke></minimax:tool_call>'),
    ],
)
def test_calls_of_models_that_reason(name, reasoning, call):
    def make():
        return OutputParser(make_reasoning_parser(name), tool_parsers.make(name, TOOLS))

    check(make, case("both", reasoning + call, "", ("g", "{}"), reasoning="a"))


def test_either_parser_may_be_missing():
    text = f"<think>a</think>{HERMES}"
    check(lambda: OutputParser(), case("none", text, text))
    check(
        lambda: OutputParser(tools=tool_parsers.make("hermes")),
        case("calls", text, "<think>a</think>", ("f", "{}")),
    )
    check(
        lambda: OutputParser(make_reasoning_parser("deepseek_r1")),
        case("reasoning", text, HERMES, reasoning="a"),
    )


def test_special_tokens_are_kept_if_one_of_them_needs_them():
    assert OutputParser(make_reasoning_parser("gpt_oss")).keeps_special_tokens
    for name in ("gemma4", "glm45", "minimax_m2"):
        assert OutputParser(make_reasoning_parser(name)).keeps_special_tokens
    assert OutputParser(None, tool_parsers.make("mistral")).keeps_special_tokens
    assert not OutputParser(make_reasoning_parser("qwen3")).keeps_special_tokens


def test_a_prompt_says_whether_the_output_begins_within_reasoning():
    assert starts_in_reasoning("qwen3", "<|im_start|>assistant\n<think>\n")
    assert not starts_in_reasoning("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert starts_in_reasoning("glm45", "<|assistant|>\n<think>")
    assert not starts_in_reasoning("glm45", "<|assistant|>\n<think></think>")
    assert starts_in_reasoning("gemma4", "<|turn>model\n<|channel>thought\n")
    assert not starts_in_reasoning("gemma4", "<|turn>model\n<|channel>thought\n<channel|>")
    assert not starts_in_reasoning("gpt_oss", "<|start|>assistant")


def test_an_unknown_parser_is_named():
    with pytest.raises(ValueError, match="'qwen9' is not known; there are deepseek_r1"):
        make_reasoning_parser("qwen9")
