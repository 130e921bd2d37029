"""Tools of requests: what chat templates get is what vLLM gives them, so that prompts are the same."""

from __future__ import annotations

import json

import pytest

from jaxpage.server.protocol.responses import ResponsesRequest
from tests.server.conftest import serving
from tests.server.test_operation import ask, error_of

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
# (a function as a client writes it, as vLLM 0.32 dumps it)
FUNCTIONS = [
    ({"name": "f"}, {"name": "f", "description": None, "parameters": None}),
    (
        {"parameters": SCHEMA, "strict": False, "description": "d", "name": "f", "returns": "int"},
        {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False},
    ),
]


@pytest.fixture(scope="module")
def url(llm):
    with serving(llm, trust_request_chat_template=True) as url:
        yield url


@pytest.mark.parametrize(("given", "seen"), FUNCTIONS, ids=["only a name", "every field"])
@pytest.mark.parametrize("kind", [{"type": "function"}, {}], ids=["typed", "untyped"])
def test_chat_templates_get_vllm_s_fields_in_its_order(url, given, seen, kind):
    tools = [{"cache_control": {}, "function": given, **kind}]
    body = {"messages": MESSAGES, "tools": tools, "chat_template": "{{ tools | tojson }}"}
    found = json.loads(ask(url, "/tokenize", body)[2])["tokens"]
    prompt = json.loads(ask(url, "/detokenize", {"tokens": found})[2])["prompt"]
    assert prompt == json.dumps([{"type": "function", "function": seen}])
    status, _, text = ask(url, "/v1/chat/completions", body | {"max_tokens": 1})
    assert status == 200 and json.loads(text)["usage"]["prompt_tokens"] == len(found)


@pytest.mark.parametrize(("given", "seen"), FUNCTIONS, ids=["only a name", "every field"])
def test_tools_of_responses_are_those_of_chats(given, seen):
    body = ResponsesRequest.model_validate(
        {"input": "x", "tools": [{"type": "function", **given}], "tool_choice": "auto"}
    )
    (tool,) = body.to_chat(MESSAGES, 100).tool_list or ()
    assert json.dumps(tool) == json.dumps({"type": "function", "function": seen})


@pytest.mark.parametrize(
    ("tool", "complaint"),
    [
        ({"type": "web_search", "function": {"name": "f"}}, "tools.0.type: Input should be 'function'"),
        ({"type": "function"}, "tools.0.function: Field required"),
        ({"type": "function", "function": {"description": "f"}}, "tools.0.function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": "x"}}, "parameters"),
    ],
    ids=["unknown type", "no function", "no name", "no schema"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tools_that_are_no_functions_are_refused(url, path, tool, complaint):
    status, _, text = ask(url, path, {"messages": MESSAGES, "tools": [tool]})
    assert status == 400 and complaint in error_of(text)["message"]
