"""The formats of tool calls by vLLM's names of their parsers, and which of them a chat template uses."""

from __future__ import annotations

from typing import Any

from jaxpage.tool_parsers import (
    deepseek_v3,
    gemma4,
    glm45,
    hermes,
    lfm2,
    llama3_json,
    minimax_m2,
    mistral,
    pythonic,
    qwen3_coder,
)
from jaxpage.tool_parsers.deltas import ParsedOutput, join
from jaxpage.tool_parsers.parser import Format, Parser
from jaxpage.tool_parsers.tools import to_tools

FORMATS: dict[str, Format] = {
    "deepseek_v3": deepseek_v3.FORMAT,
    "gemma4": gemma4.FORMAT,
    "glm45": glm45.FORMAT,
    "hermes": hermes.FORMAT,
    "lfm2": lfm2.FORMAT,
    "llama3_json": llama3_json.FORMAT,
    "minimax_m2": minimax_m2.FORMAT,
    "mistral": mistral.FORMAT,
    "pythonic": pythonic.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
}

# vLLM's other names of the same formats.
ALIASES = {
    "glm47": "glm45",
    "llama4_json": "llama3_json",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
}
# gpt-oss writes calls where it writes its reasoning, so that one parser of `reasoning_parsers` reads both.
OF_GPT_OSS = ("openai", "gpt_oss", "openai_gptoss")
NAMES = tuple(sorted((*FORMATS, *ALIASES, *OF_GPT_OSS)))

# The parser, strings in its templates, and strings in similar templates of other formats. The first match applies.
_TEMPLATES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter="), ()),
    ("glm45", ("<tool_call>", "<arg_key>", "<arg_value>"), ()),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name="), ()),
    ("hermes", ("<tool_call>", "arguments"), ("<arg_key>",)),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json"), ()),  # V3.1 has no code block
    ("gemma4", ("<|tool_call>call:", "<tool_call|>"), ()),
    ("lfm2", ("List of tools: <|tool_list_start|>[",), ()),
    ("lfm2", ("List of tools: [", "<|im_start|>"), ()),  # LFM2.5
    ("pythonic", ("[func_name1(params_name1=params_value1",), ("<TOOLCALL>",)),  # Nemotron
    ("llama3_json", ('"parameters": dictionary of argument name', "<|eot_id|>"), ()),
)


def find_format(name: str) -> Format:
    """Raises ValueError for an unknown name."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise ValueError(f"tool parser {name!r} is not known; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def make(name: str, tools: Any = None) -> Parser:
    """A parser for one output of a request with `tools`, as OpenAI lists them. Raises ValueError."""
    format_ = find_format(name)
    checked = to_tools(tools, are_forced=False)
    return Parser(
        lambda source, writer: format_.read(source, writer, checked),
        keeps_special_tokens=format_.keeps_special_tokens,
        separators=format_.separators,
    )


def parse(name: str, tools: Any, text: str) -> ParsedOutput:
    """Parse a whole output. Raises ValueError for an invalid name or invalid tools, never for the text."""
    parser = make(name, tools)
    return join([*parser.feed(text), *parser.finish()])


def parser_for_template(chat_template: str) -> str | None:
    """The tool parser for the format in a chat template; None if it is not recognized."""
    for name, present, absent in _TEMPLATES:
        if all(text in chat_template for text in present):
            if not any(text in chat_template for text in absent):
                return name
    return None
