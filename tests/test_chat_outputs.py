"""Tools and reasoning in chats: from options to grammars, from texts to completions."""

from __future__ import annotations

import json

import jsonschema
import pytest

from jaxpage import EngineConfig, SamplingParams, tiny
from jaxpage.chat_outputs import chat_format
from jaxpage.chat_template import render
from jaxpage.demo import checkpoint
from jaxpage.outputs import CompletionOutput, RequestOutput, RequestStateStats
from jaxpage.tokenizer import load_tokenizer
from jaxpage.tool_parsers import FORMATS
from tests import checkpoints

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 9]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": NOTHING}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
HERMES = "{{ '<tool_call>' }} arguments"


def make(template=HERMES, **options):
    return chat_format(EngineConfig.from_options(model="m", **options), None, template)


def output_of(text: str, prompt: str = "") -> RequestOutput:
    completion = CompletionOutput(
        index=0, text=text, token_ids=[], cumulative_logprob=None, logprobs=None
    )
    return RequestOutput(
        request_id="0", prompt=prompt, prompt_token_ids=[], prompt_logprobs=None, outputs=[completion], finished=True,
        metrics=RequestStateStats(),
    )  # fmt: skip


def test_formats_follow_from_options_then_from_the_template():
    assert make().tool_parser == "hermes"
    assert make(tool_call_parser="mistral").tool_parser == "mistral"
    assert make("plain").tool_parser is None
    assert make(reasoning_parser="qwen3").reasoning_parser == "qwen3"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("qwen3_json", "hermes"),
        ("qwen3_xml", "qwen3_coder"),
        ("llama4_json", "llama3_json"),
        ("glm47", "glm45"),
    ],
)
def test_other_names_of_vllm_mean_the_same_formats(name, ours):
    assert make(tool_call_parser=name).tool_parser == ours


def test_the_parser_of_gpt_oss_reads_calls_and_reasoning():
    chat = make(tool_call_parser="openai")
    assert chat.tool_parser is None and chat.reasoning_parser == "gpt_oss"
    assert make(reasoning_parser="openai_gptoss").reasoning_parser == "openai_gptoss"
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    assert read(chat, text) == ("", "hm", [("now", '{"a": 1}')])
    with pytest.raises(ValueError, match="'required' is not supported for gpt-oss"):
        chat.params(SamplingParams(), TOOLS, "required")


def test_unknown_parsers_are_refused_at_the_start():
    for name in ("x", "qwen3_code", ""):
        with pytest.raises(ValueError, match="tool_call_parser must be one of None, deepseek_v3"):
            EngineConfig(model="m", tool_call_parser=name)
    with pytest.raises(ValueError, match="reasoning_parser='granite' is not known; there are deep"):
        EngineConfig.from_options(model="m", reasoning_parser="granite")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def read(chat, text, choice="auto", tools=TOOLS, prompt=""):
    output = output_of(text, prompt)
    chat.read(output, tools, choice)
    (c,) = output.outputs
    assert c.text == text
    return c.content, c.reasoning, [(call.name, call.arguments) for call in c.tool_calls]


def test_texts_are_read():
    chat = make(reasoning_parser="qwen3")
    call = ("weather", '{"city": "Rome", "days": 2}')
    assert read(chat, f"<think>\nhm\n</think>\n\nSo: {CALL}") == ("\n\nSo: ", "\nhm\n", [call])
    assert read(chat, f"hm</think>{CALL}", prompt="a<think>\n") == ("", "hm", [call])
    assert read(chat, CALL, choice="none") == (CALL, None, [])
    assert read(chat, CALL, tools=None) == (CALL, None, [])
    assert read(make("plain"), CALL) == (CALL, None, [])


# The parts of Qwen3.5's that matter here.
QWEN_3_5 = """{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nReply so:\\n\\n<tool_call>\\n<function=name>\\n<parameter=first>\\n1\\n</parameter>' }}
{{- '\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking is not false else '<think>\\n\\n</think>\\n\\n') }}"""


@pytest.mark.parametrize("thinks", [True, False])
def test_qwen3_5_begins_to_reason_in_the_prompt_and_calls_as_qwen3_coder_does(thinks, tmp_path):
    chat = make(QWEN_3_5, reasoning_parser="qwen3")
    assert chat.tool_parser == "qwen3_coder"
    called = {"type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
    ]
    tokenizer = load_tokenizer(str(tiny.build(tmp_path / "tiny")))
    options = {"chat_template": QWEN_3_5, "tools": TOOLS, "enable_thinking": thinks}
    prompt = render(messages, tokenizer, **options)
    assert "<function=now>\n<parameter=zone>\nUTC\n</parameter>" in prompt
    call = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>"
    text = f"<tool_call>\n{call}\n</function>\n</tool_call>"
    expected = [("weather", '{"city": "Rome", "days": 2}')]
    assert prompt.endswith("<think>\n") == thinks
    if not thinks:
        assert read(chat, text, prompt=prompt) == ("", None, expected)
        return
    found = read(chat, f"Rome?\n</think>\n\n{text}", prompt=prompt)
    assert found == ("", "Rome?\n", expected)
    # It may call a tool in the middle of its reasoning.
    assert read(chat, f"Rome?\n{text}", prompt=prompt) == ("", "Rome?\n", expected)


def test_params_follow_from_the_choice():
    chat, params = make(), SamplingParams(max_tokens=5)
    auto = chat.params(params, TOOLS, "auto")
    assert auto.structured_outputs is None and not auto.skip_special_tokens
    assert params.skip_special_tokens
    assert chat.params(params, None, "auto") is params
    assert chat.params(params, TOOLS, "none") is params
    for choice in ("required", NAMED):
        assert "weather" in chat.params(params, TOOLS, choice).structured_outputs.grammar
    with pytest.raises(ValueError, match="leave one out"):
        chat.params(SamplingParams(structured_outputs={"regex": "a"}), TOOLS, "required")
    with pytest.raises(ValueError, match="start the engine with tool_call_parser"):
        make("plain").params(params, TOOLS, "required")


@pytest.mark.slow
@pytest.mark.parametrize("parser", FORMATS)
def test_calls_that_must_be_made_are_made(parser):
    options = {"skip_tokenizer_init": False, "max_model_len": 400, "tool_call_parser": parser}
    llm = checkpoints.make_llm(checkpoint(), **options)
    messages = [{"role": "user", "content": "Hello!"}]
    params = SamplingParams(n=4, temperature=1.3, seed=1, max_tokens=150)
    for choice in ("required", NAMED):
        (output,) = llm.chat(messages, params, use_tqdm=False, tools=TOOLS, tool_choice=choice)
        ended = [c for c in output.outputs if c.finish_reason == "stop"]
        for c in ended:
            assert c.tool_calls and not c.content.strip(), c.text
            for call in c.tool_calls:
                assert call.name in ("weather", "now")
                if call.name == "weather":
                    jsonschema.validate(json.loads(call.arguments), WEATHER)
            assert choice == "required" or [call.name for call in c.tool_calls] == ["weather"]
        assert ended or choice == "required"  # which allows one call after another
    (free,) = llm.chat(messages, params, use_tqdm=False, tools=TOOLS, tool_choice="none")
    assert [c.tool_calls for c in free.outputs] == [[]] * 4
