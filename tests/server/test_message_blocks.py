"""Anthropic's messages made into a chat, and what a model writes as content blocks and their events."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter, ValidationError
from starlette.responses import JSONResponse

from jaxpage.reasoning_parsers import OutputParser, make_reasoning_parser
from jaxpage.server.error_response import error_response
from jaxpage.server.errors import ApiError
from jaxpage.server.message_output import MessageOutput
from jaxpage.server.protocol.messages import CountTokensRequest, MessagesRequest
from jaxpage.tool_parsers import make
from tests.test_chat_outputs import TOOLS, WEATHER

CACHED = {"cache_control": {"type": "ephemeral"}}
PICTURE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
URL = "data:image/png;base64,AAAA"
USE = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome"}},
}
read_event = TypeAdapter(RawMessageStreamEvent).validate_python


def text(value: str, **rest: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **rest}


def image(source: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image", "source": source}


def result(content: Any, **rest: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "1", "content": content, **rest}


def seen(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The chat messages of a conversation."""
    body = {"messages": messages, "max_tokens": 1, **fields}
    return MessagesRequest.model_validate(body).to_chat(limits_thinking=True).messages


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def test_a_conversation_is_that_of_a_chat():
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    billing = text("x-anthropic-billing-header: cch=1a2b;")
    found = seen(
        user([text("What is it?", **CACHED), image(PICTURE | CACHED)]),
        assistant(thought, hidden, text("A map. "), text(""), USE),
        user([result([text("22"), image({"type": "url", "url": "http://a/b"})]), text("And?")]),
        system=[billing, text("Be brief.", **CACHED)],
    )
    picture = {"type": "image_url", "image_url": {"url": URL}}
    other = {"type": "image_url", "image_url": {"url": "http://a/b"}}
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("What is it?"), picture]},
        {"role": "assistant", "reasoning": "Hm.", "content": "A map. ", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "22"},
        {"role": "user", "content": [other, text("And?")]},
    ]


def test_messages_of_one_role_are_one_turn():
    found = seen(user("a"), user("b"), assistant(text("c")), assistant(USE), user([result("d")]))
    assert found == [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "d"},
    ]
    assert seen({"role": "ctx", "content": "a"}) == [user("a")]
    header = "x-anthropic-billing-header"  # not the system's
    assert seen(user(header)) == [user(header)]


def test_later_messages_of_the_system_change_nothing_before_them():
    """The beginning must stay the same, and so must what templates take for the user's last turn."""
    note = {"role": "system", "content": "note"}
    assert seen(note, user("a"), system="s") == [
        {"role": "system", "content": "s\n\nnote"},
        user("a"),
    ]
    assert seen(user("a"), note) == [user("a\n\nnote")]
    used = assistant(USE)
    ends = {"role": "tool", "tool_call_id": "1", "name": "weather"}
    for order in ((user([result("22")]), note), (note, user([result("22")]))):
        assert seen(user("a"), used, *order)[2:] == [ends | {"content": "22\n\nnote"}]
    said = seen(user("a"), used, note, user([result("22"), text("b")]))[2:]
    assert said == [ends | {"content": "22"}, user("note\n\nb")]


def test_long_turns_take_time_in_proportion_to_their_length():
    """A copy of the turn for each of its messages would be 20 GB of copies here, in the event loop."""
    long = "x" * 32_000
    start = time.perf_counter()
    (turn,) = seen(*[user(long)] * 1000)
    assert time.perf_counter() - start < 1
    assert turn["content"] == "\n\n".join([long] * 1000)


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result("no such city", is_error=True), "Error: no such city"),
        (result("<error>no such city</error>", is_error=True), "<error>no such city</error>"),
        (result(None), ""),
        (result([text("a"), text("b")]), "a\nb"),
        (result([{"type": "tool_reference", "tool_name": "now"}]), "now"),
    ],
)
def test_results_of_tools_are_texts(block, content):
    assert seen(user("a"), assistant(USE), user([block]))[2]["content"] == content


def test_an_answer_continues_a_last_message_of_the_assistant():
    def chat(*messages):
        return CountTokensRequest.model_validate({"messages": messages}).to_chat()

    found = chat(user("a"), assistant(text("Once")))
    assert found.continue_final_message and not found.add_generation_prompt
    found = chat(user("a"), assistant())
    assert found.add_generation_prompt and found.messages == [user("a")]
    for last in (assistant(USE), assistant({"type": "thinking", "thinking": "x"})):
        with pytest.raises(ValueError, match="messages must end with the user"):
            chat(user("a"), last)


def test_fields_of_a_request_are_those_of_a_chat():
    tool = {"name": "weather", "description": "d", "input_schema": WEATHER, **CACHED}
    body = {
        "messages": [user("a")], "max_tokens": 9, "stop_sequences": ["x"], "top_k": 3, "seed": 5,
        "tools": [tool, tool | {"type": "custom", "strict": True}], "metadata": {"user_id": "u"},
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": WEATHER}},
    }  # fmt: skip
    chat = MessagesRequest.model_validate(body).to_chat(limits_thinking=True)
    assert (chat.max_tokens, chat.stop, chat.top_k, chat.seed) == (9, ["x"], 3, 5)
    function = {"name": "weather", "description": "d", "parameters": WEATHER}
    assert chat.tool_list == [
        {"type": "function", "function": function},
        {"type": "function", "function": function | {"strict": True}},
    ]
    assert chat.tool_choice == "required" and chat.parallel_tool_calls is False
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert chat.thinking_token_budget == 1024 and chat.reasoning_effort == "low"
    assert chat.response_format == {"type": "json_schema", "json_schema": {"schema": WEATHER}}
    body |= {"thinking": {"type": "disabled"}, "tool_choice": {"type": "tool", "name": "weather"}}
    chat = MessagesRequest.model_validate(body).to_chat(limits_thinking=True)
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert chat.thinking_token_budget is None
    assert chat.tool_choice == {"type": "function", "function": {"name": "weather"}}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 7}, "tools": [], "tool_choice": None}
    chat = MessagesRequest.model_validate(body).to_chat(limits_thinking=False)
    assert chat.thinking_token_budget is None and chat.tools is None and chat.choice() == "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": [user([result("x")])]}, "no tool_use with this id"),
        ({"messages": [user([{"type": "document"}])]}, "'text', 'image', 'tool_result'"),
        ({"messages": [user([image({"type": "file", "file_id": "f"})])]}, "'base64', 'url'"),
        ({"messages": [assistant(result("x"))]}, "'tool_use'"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "'user'"),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages has no content"),
        ({"system": [image(PICTURE)]}, "Input should be 'text'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "Anthropic's own"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"tool_choice": {"type": "tool"}}, "needs the name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers is not served"),
        ({"stop": ["x"], "stop_sequences": ["y"]}, "give one of them"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_served_is_refused(change, message):
    with pytest.raises((ValueError, ValidationError), match=message):
        seen(**({"messages": [user("x")]} | change))


def seen_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks as a client of a stream puts them together."""
    blocks, is_open = [], False
    for event in events:
        read_event(event)
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert not is_open and index == len(blocks)
                blocks.append(dict(block) | ({"input": ""} if block["type"] == "tool_use" else {}))
                is_open = True
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert is_open and index == len(blocks) - 1
                ((name, value),) = ((k, v) for k, v in delta.items() if k != "type")
                name = "input" if name == "partial_json" else name
                blocks[-1][name] += value
                assert value != ""
            case {"type": "content_block_stop", "index": index}:
                assert is_open and index == len(blocks) - 1
                is_open = False
    assert not is_open
    return blocks


def written(answer: str, size: int, **options: bool) -> tuple[MessageOutput, list[dict[str, Any]]]:
    """An answer that came in pieces of this size: its output, and its blocks as its stream tells them."""
    parser = OutputParser(make_reasoning_parser("qwen3"), make("hermes", TOOLS))
    output, events = MessageOutput(parser, **options), []
    for begin in range(0, len(answer), size):
        events += output.feed(answer[begin : begin + size])
    events += output.finish()
    return output, seen_of(events)


ANSWER = (
    '<think>Two\nthings.</think>\n\nWell. <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
)


@pytest.mark.parametrize("size", [1, 3, 20, 1000])
def test_thinking_text_and_calls_are_blocks(size):
    output, told = written(ANSWER, size)
    thought, said, now, weather = output.content()
    assert thought["type"] == "thinking" and thought["thinking"] == "Two\nthings."
    assert said == text("\n\nWell. ")
    assert (now["name"], now["input"]) == ("now", {})
    assert (weather["name"], weather["input"]) == ("weather", {"city": "Rome", "days": 2})
    assert now["id"] != weather["id"] and now["id"].startswith("toolu_") and output.has_calls
    assert told[:2] == [thought, said] and len(thought["signature"]) == 64
    read = [block | {"input": json.loads(block["input"])} for block in told[2:]]
    assert read == [now, weather]


def test_of_parallel_calls_the_first_is_left_if_the_client_wants_one():
    output, told = written(ANSWER, 3, parallel_calls=False)
    assert [block["type"] for block in output.content()] == ["thinking", "text", "tool_use"]
    assert [block["type"] for block in told] == ["thinking", "text", "tool_use"]


def test_thinking_that_is_omitted_is_an_empty_block():
    output, told = written(ANSWER, 3, shows_thinking=False)
    assert output.content()[0] == told[0] and told[0]["thinking"] == "" != told[0]["signature"]
    assert told[1] == text("\n\nWell. ")


def test_white_space_alone_is_a_block_only_if_it_is_the_whole_answer():
    for answer in ("<think>\n\n</think>\n\n", "\n"):
        output, told = written(answer, 1)
        (block,) = output.content()
        assert told == [block] and block["text"] == answer.rpartition(">")[2]
    output, told = written("", 1)
    assert output.content() == told == [] and not output.has_calls


def test_of_a_call_that_is_cut_off_what_is_complete_is_left():
    output, told = written(ANSWER[: ANSWER.index('Rome"')], 5)
    assert output.content()[-1]["input"] == {}
    output, told = written(ANSWER[: ANSWER.index(', "days')], 5)
    assert output.content()[-1]["input"] == {"city": "Rome"}
    assert told[-1]["input"].startswith('{"city": "Rome"')


def test_numbers_that_are_too_large_for_json_are_null():
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1e999}}\n</tool_call>'
    output, told = written(call, 5)
    assert output.content()[0]["input"] == {"city": "Rome", "days": None}
    JSONResponse(output.content())  # which has no infinity
    assert told[0]["input"] == '{"city": "Rome", "days": 1e999}'


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(400, "x"), 400, "invalid_request_error"),
        (ApiError(401, "x"), 401, "authentication_error"),
        (ApiError(403, "x"), 403, "permission_error"),
        (ApiError(404, "x"), 404, "not_found_error"),
        (ApiError(405, "x"), 405, "invalid_request_error"),
        (ApiError(409, "x"), 409, "conflict_error"),
        (ApiError(413, "x"), 413, "request_too_large"),
        (ApiError(500, "x"), 500, "api_error"),
        (ApiError(503, "x"), 503, "api_error"),
        (ApiError(503, "x", headers={"Retry-After": "1"}), 529, "overloaded_error"),
    ],
)
def test_errors_have_anthropic_s_types_on_its_paths_alone(error, status, kind):
    scope: dict[str, Any] = {
        "type": "http", "path": "/api/v1/messages", "root_path": "/api",
        "headers": [(b"x-request-id", b"mine")],
    }  # fmt: skip
    for path in ("/api/v1/messages", "/api/v1/messages/count_tokens"):
        response = error_response(error, scope | {"path": path})
        assert response.status_code == status and response.headers["request-id"] == "mine"
        assert json.loads(bytes(response.body)) == {
            "type": "error",
            "error": {"type": kind, "message": "x"},
            "request_id": "mine",
        }
    for path in ("/api/v1/messagesx", "/v1/chat/completions"):
        response = error_response(error, scope | {"path": path})
        assert response.status_code == error.status
        assert json.loads(bytes(response.body)) == error.body()
