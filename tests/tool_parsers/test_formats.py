"""Which parser a chat template implies, and what is said of names and tools that are wrong."""

from __future__ import annotations

import pytest

from jaxpage import tool_parsers
from tests.tool_parsers.cases import tool

QWEN = (
    "{{- '<|im_start|>system\\n' }}return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
)
TEMPLATES = {
    "hermes": QWEN,
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=arguments>\\nvalue_1\\n</parameter>",
    "llama3_json": '<|eot_id|>Respond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}.",
    "mistral": "{{- '[TOOL_CALLS][' }}{%- for tool_call in message.tool_calls %}",
    "deepseek_v3": "{{'<｜Assistant｜><｜tool▁calls▁begin｜>'}}{{'\\n' + '```json' + '\\n'}}",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}",
    "glm45": "{{ '\\n<tool_call>' + tc.name }}\n{% for k, v in tc.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}\n</tool_call>",
    "minimax_m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}\n<invoke name=\"tool-name-1\">",
    "lfm2": '{%- set ns.system_prompt = ns.system_prompt + "List of tools: <|tool_list_start|>[" -%}',
    "pythonic": "in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...)]",
}
OTHERS = {
    "no tools": "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}",
    "DeepSeek V3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{tool.name}}<｜tool▁sep｜>{{args}}",
    "Nemotron": "<TOOLCALL>[func_name1(params_name1=params_value1)]</TOOLCALL>",
}


@pytest.mark.parametrize("name", tool_parsers.FORMATS)
def test_a_template_implies_the_parser_of_what_it_teaches(name):
    assert tool_parsers.parser_for_template(TEMPLATES[name]) == name


def test_later_templates_of_lfm2_have_fewer_markers():
    template = '{%- set system = "List of tools: [" -%}{{- "<|im_start|>system\\n" + system -}}'
    assert tool_parsers.parser_for_template(template) == "lfm2"


@pytest.mark.parametrize("name", OTHERS)
def test_other_templates_imply_none(name):
    assert tool_parsers.parser_for_template(OTHERS[name]) is None


def test_formats_say_whether_special_tokens_must_be_kept():
    kept = {name for name, f in tool_parsers.FORMATS.items() if f.keeps_special_tokens}
    assert kept == set(tool_parsers.FORMATS) - {"pythonic", "qwen3_coder"}
    for name, format_ in tool_parsers.FORMATS.items():
        assert tool_parsers.make(name).keeps_special_tokens == format_.keeps_special_tokens


def test_an_unknown_parser_is_named():
    with pytest.raises(
        ValueError, match="'llama9' is not known; there are deepseek_v3, gemma4, glm45, hermes"
    ):
        tool_parsers.make("llama9")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "tools must be a list"),
        ([{"name": "f"}], "tool 0 must be"),
        ([tool("f", {}), {"function": {"name": 1}}], "the name of tool 1 must be letters"),
        ([{"function": {"name": "f", "parameters": []}}], "tool 'f' must be a JSON schema"),
    ],
)
def test_wrong_tools_are_named(tools, message):
    with pytest.raises(ValueError, match=message):
        tool_parsers.make("hermes", tools)
    with pytest.raises(ValueError, match=message):
        tool_parsers.tool_grammar("hermes", tools, "required")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([tool("a b", {})], "got 'a b'"),
        ([tool("f", {}), tool("f", {})], "2 tools have the name 'f'"),
        (
            [{"function": {"name": "f", "parameters": {"type": "array"}}}],
            "tool 'f' must be of type",
        ),
        ([tool("f", {"a": 1})], "properties of tool 'f' must be a dict of JSON schemas"),
        ([tool("f", {}, required="a")], "required of tool 'f' must be a list of names"),
    ],
)
def test_some_tools_can_be_called_but_not_forced(tools, message):
    def choice(name: str):
        return {"type": "function", "function": {"name": name}}

    name = tools[0]["function"]["name"]
    for parser, text in (
        ("hermes", f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>'),
        (
            "qwen3_coder",
            f"<tool_call>\n<function={name}>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
    ):
        (call,) = tool_parsers.parse(parser, tools, text).tool_calls
        assert call.name == name and call.complete
    tool_parsers.tool_grammar("hermes", [*tools, tool("other", {})], choice("other"))
    with pytest.raises(ValueError, match=message):
        tool_parsers.tool_grammar("hermes", tools, choice(name))
    with pytest.raises(ValueError, match=message):
        tool_parsers.tool_grammar("hermes", tools, "required")
