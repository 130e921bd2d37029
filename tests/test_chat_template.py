"""What a chat template gets to see: contents as text or parts, tool calls, and clear refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxpage import tiny
from jaxpage.chat_template import detect_content_format
from jaxpage.pictures.border import Picture
from jaxpage.pictures.messages import MediaPart
from jaxpage.prompts import parse_chat
from jaxpage.tokenizer import load_tokenizer

DUMP = "{{ messages | tojson }}"
PARTS = (
    "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
)
HELLO = [{"type": "text", "text": "the"}, {"type": "text", "text": "dog"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(tiny.build(tmp_path_factory.mktemp("chat") / "tiny")))


def seen(tokenizer, *messages, **options) -> list[dict]:
    """The messages as the template gets them."""
    (prompt,) = parse_chat(messages, tokenizer, chat_template=DUMP, **options)
    return json.loads(prompt.text)


def call(arguments) -> dict:
    return {"type": "function", "id": "c1", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{", {}),
        ("[1]", {}),
    ],
)
def test_arguments_of_tool_calls_are_decoded_once(tokenizer, arguments, expected):
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    (got,) = seen(tokenizer, message)
    assert got["tool_calls"] == [call(expected)]
    assert message["tool_calls"] == [call(arguments)]  # the caller's stays as it was


def test_a_template_encodes_arguments_as_json_not_as_a_string(tokenizer):
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    message = {"role": "assistant", "tool_calls": [call('{"a": 1}')]}
    (prompt,) = parse_chat([message], tokenizer, chat_template=template)
    assert prompt.text == '{"a": 1}'


@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_a_turn_that_only_calls_tools_has_empty_content(tokenizer, message):
    message = {"role": "assistant", "tool_calls": [call("{}")], **message}
    assert seen(tokenizer, message)[0]["content"] == ""
    (prompt,) = parse_chat([message], tokenizer, add_generation_prompt=False)
    assert prompt.text == "<|im_start|>assistant\n<|im_end|>\n"


def test_empty_tool_calls_are_left_out(tokenizer):
    for none in ([], None):
        (got,) = seen(tokenizer, {"role": "assistant", "content": "x", "tool_calls": none})
        assert got == {"role": "assistant", "content": "x"}


def test_reasoning_has_its_older_name_too(tokenizer):
    (got,) = seen(tokenizer, {"role": "assistant", "content": "x", "reasoning": "why"})
    assert got["reasoning"] == got["reasoning_content"] == "why"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning_content": "a", "reasoning": "b"}, "b"),
        ({"reasoning_content": "a", "reasoning": None}, "a"),
    ],
)
def test_reasoning_under_its_older_name_has_the_newer_too(tokenizer, given, expected):
    (got,) = seen(tokenizer, {"role": "assistant", "content": "x", **given})
    assert got["reasoning"] == got["reasoning_content"] == expected


def test_empty_parts_add_no_lines(tokenizer):
    parts = [{"type": "text", "text": text} for text in ("", "x", "", "y", "")]
    (got,) = seen(tokenizer, {"role": "user", "content": parts})
    assert got["content"] == "x\ny"


def test_developers_are_the_system_for_templates_that_do_not_know_them(tokenizer):
    conversation = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "developer", "content": [HELLO[0], {"type": "text", "text": "c"}], "tools": []},
        {"role": "system", "content": ""},
    ]
    merged = {"role": "system", "content": f"a\n\n{HELLO[0]['text']}\nc"}
    assert seen(tokenizer, *conversation) == [merged, conversation[1]]
    (prompt,) = parse_chat(conversation, tokenizer, chat_template=PARTS)
    assert prompt.text == f"<{merged['content']}><b>"
    (alone,) = seen(tokenizer, {"role": "developer", "content": "x"})
    assert alone == {"role": "system", "content": "x"}
    knows = "{% for m in messages %}{{ m.role }} {{ m.role == 'developer' }} {% endfor %}"
    (prompt,) = parse_chat(conversation, tokenizer, chat_template=knows)
    assert prompt.text == "system False user False developer True system False "
    two = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    assert seen(tokenizer, *two) == two  # as they are, without a developer


def test_a_template_that_prints_only_text_parts_gets_the_merged_system(tokenizer):
    template = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
    )
    roles = {"system": "A", "developer": "B", "user": "hi"}
    conversation = [{"role": role, "content": text} for role, text in roles.items()]
    (prompt,) = parse_chat(conversation, tokenizer, chat_template=template)
    assert prompt.text == "system:A\n\nB;user:hi;"


def test_pictures_cannot_be_in_messages_that_are_merged(tokenizer):
    picture = Picture(
        patches=np.zeros((1, 3), np.float32), grid=(1, 1, 1), num_tokens=1, content_hash=bytes(32)
    )
    with_picture = [MediaPart(picture), *HELLO]
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "b"}
    developer = {"role": "developer", "content": with_picture}
    message = "developer or system message has a picture, .* in messages of the user"
    for conversation in (
        [system, developer, user],
        [user, developer],
        [system | {"content": with_picture}, developer | {"content": "b"}],
    ):
        with pytest.raises(ValueError, match=message):
            parse_chat(conversation, tokenizer, chat_template=PARTS)
    (prompt,) = parse_chat([developer, user], tokenizer, chat_template=PARTS)
    assert prompt.text == "<><the><dog><b>"  # alone at the beginning: nothing is merged


def test_a_template_that_iterates_over_parts_gets_parts(tokenizer):
    conversation = [{"role": "user", "content": HELLO}, {"role": "user", "content": "plain"}]
    (prompt,) = parse_chat(conversation, tokenizer, chat_template=PARTS)
    assert prompt.text == "<the><dog><plain>"


def test_a_template_that_prints_the_content_gets_text(tokenizer):
    (got,) = seen(tokenizer, {"role": "user", "content": HELLO})
    assert got["content"] == "the\ndog"
    (got,) = seen(tokenizer, {"role": "user", "content": ["the", "dog"]})
    assert got["content"] == "the\ndog"


def test_refusals_and_thoughts_are_text(tokenizer):
    parts = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "refusal", "refusal": "no"},
        {"type": "text", "text": "x", "cache_control": 1},
    ]
    message = {"role": "assistant", "content": parts}
    (got,) = seen(tokenizer, message)
    assert got["content"] == "hm\nno\nx"
    (got,) = seen(tokenizer, message, chat_template_content_format="openai")
    assert got["content"] == [
        {"type": "text", "text": "hm"},
        {"type": "text", "text": "no"},
        {"type": "text", "text": "x", "cache_control": 1},
    ]
    with pytest.raises(ValueError, match='must have "refusal" of type str'):
        seen(tokenizer, {"role": "assistant", "content": [{"type": "refusal", "text": "no"}]})


def test_the_format_can_be_said(tokenizer):
    message = {"role": "user", "content": "x"}
    (got,) = seen(tokenizer, message, chat_template_content_format="openai")
    assert got["content"] == [{"type": "text", "text": "x"}]
    (got,) = seen(tokenizer, message, chat_template_content_format="string")
    assert got["content"] == "x"
    with pytest.raises(ValueError, match="must be one of auto, string, openai, got 'parts'"):
        seen(tokenizer, message, chat_template_content_format="parts")


def test_what_a_tool_answers_is_text(tokenizer):
    message = {"role": "tool", "tool_call_id": "c1", "content": HELLO}
    (got,) = seen(tokenizer, message, chat_template_content_format="openai")
    assert got == {"role": "tool", "tool_call_id": "c1", "content": "the\ndog"}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (tiny.CHAT_TEMPLATE, "string"),
        (PARTS, "openai"),
        ("{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% for c in m.content | list %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% set all = messages %}{% for m in all %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages[1:] %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}"
            "{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(x) %}{% for c in x %}{{ c.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(x) %}{% for c in x %}{{ c.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(x=m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}"
            "{{ show(tools) }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "string",
        ),
        ("{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        ("{{ broken(", "string"),
    ],
)
def test_the_format_is_detected_as_vllm_does(template, expected):
    assert detect_content_format(template) == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (5, "messages must be a list of dicts"),
        ([5], "messages must be a list of dicts"),
        ("x", "messages must be a list of dicts"),
        ([[5]], 'a dict with "role" and "content", got 5'),
        ([{"role": "user", "content": [{"type": "text"}]}], 'must have "text"'),
        ([{"role": "user", "content": [5]}], "only text can be in a message, got 5"),
        ([{"role": "user", "content": 7}], "content must be a str"),
        ([{"role": "assistant", "tool_calls": [5]}], "a tool call must be"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls of a message must be a list, got 5"),
    ],
)
def test_what_is_no_conversation_is_refused(tokenizer, messages, message):
    with pytest.raises(ValueError, match=message):
        parse_chat(messages, tokenizer)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chat_template", DUMP),
        ("conversation", []),
        ("messages", []),
        ("return_dict", True),
        ("tokenize", True),
        ("tokenizer", None),
        ("tools", []),
    ],
)
def test_what_is_fixed_cannot_be_given_to_a_template(tokenizer, key, value):
    with pytest.raises(ValueError, match=f"chat_template_kwargs must not have {key}, which the"):
        seen(tokenizer, {"role": "user", "content": "x"}, chat_template_kwargs={key: value})


def test_a_template_that_is_no_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match="chat_template must be a file or a template, got 5"):
        parse_chat([{"role": "user", "content": "x"}], tokenizer, chat_template=5)
