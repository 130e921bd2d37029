"""/v1/messages, by Anthropic's own client: the answers of chats, whole and as events, and errors of its classes."""

from __future__ import annotations

import asyncio
import json

import anthropic
import jsonschema
import openai
import pytest
from anthropic import types
from pydantic import BaseModel

from jaxpage.async_llm import EngineDeadError
from jaxpage.chat_outputs import ChatFormat
from jaxpage.input_processor import InputProcessor
from jaxpage.server import messages as messages_of_server
from jaxpage.server.message_output import MessageOutput
from tests.server.conftest import serving
from tests.server.test_operation import ask, is_idle, metrics, wait_until
from tests.test_chat_outputs import NAMED, TOOLS, WEATHER

ASKED = "Tell me a story."
MESSAGES = [{"role": "user", "content": ASKED}]
CLIENT_TOOLS = [
    {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS
]
BODY = {"model": "demo", "max_tokens": 20, "messages": MESSAGES}
OF_CLAUDE_CODE = {
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "u"},
}
GREEDY = {"extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def chats(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client.chat.completions


def blocks(message) -> list[dict]:
    """Without ids, which are new each time."""
    return [block.to_dict(exclude_none=True) | {"id": None} for block in message.content]


def test_a_message_is_what_a_chat_says(client, chats):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    sampled = {"temperature": 0.9, "seed": 3, "ignore_eos": True}
    answer = client.messages.create(**BODY, system=system, extra_body=sampled)
    chat = chats.create(
        model="demo", messages=[{"role": "system", "content": "Be brief."}, *MESSAGES],
        max_tokens=20, extra_body=sampled,
    )  # fmt: skip
    (block,) = answer.content
    assert block.text == chat.choices[0].message.content != ""
    assert answer.id.startswith("msg_") and (answer.type, answer.role) == ("message", "assistant")
    assert (answer.model, answer.stop_reason, answer.stop_sequence) == ("demo", "max_tokens", None)
    usage = answer.usage
    assert usage.output_tokens == 20 and usage.cache_creation_input_tokens == 0
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    again = client.messages.create(**BODY, system=system, extra_body=sampled).usage
    assert again.cache_read_input_tokens > 0
    counted = client.messages.count_tokens(model="demo", messages=MESSAGES, system=system)
    assert (
        counted.input_tokens
        == again.input_tokens + again.cache_read_input_tokens
        == chat.usage.prompt_tokens
    )


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=str)
def test_tools_that_must_be_called(client, chats, choice):
    asked = BODY | {"max_tokens": 120, "tools": CLIENT_TOOLS, "tool_choice": choice}
    whole = client.messages.create(**asked, extra_body={"seed": 2})
    assert whole.stop_reason == "tool_use" and {b.type for b in whole.content} == {"tool_use"}
    chat = chats.create(
        model="demo", messages=MESSAGES, tools=TOOLS, max_tokens=120, seed=2,
        tool_choice="required" if choice["type"] == "any" else NAMED,
    )  # fmt: skip
    calls = [call.function for call in chat.choices[0].message.tool_calls]
    expected = [(call.name, json.loads(call.arguments)) for call in calls]
    assert [(block.name, block.input) for block in whole.content] == expected
    assert len({block.id for block in whole.content}) == len(whole.content)
    with client.messages.stream(**asked, extra_body={"seed": 2}) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        last = stream.get_final_message()
    assert blocks(last) == blocks(whole) and last.stop_reason == "tool_use"
    assert "".join(pieces) == "".join(call.arguments for call in calls)
    one = client.messages.create(
        **asked | {"tool_choice": choice | {"disable_parallel_tool_use": True}},
        extra_body={"seed": 2},
    )
    assert len(one.content) == 1


def test_events_say_what_the_whole_says(client):
    whole = client.messages.create(**BODY, **GREEDY)
    with client.messages.stream(**BODY, **GREEDY) as stream:
        told = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert told == whole.content[0].text
    assert blocks(last) == blocks(whole)
    assert (last.stop_reason, last.model) == (whole.stop_reason, "demo")
    used = last.usage
    assert used.output_tokens == whole.usage.output_tokens
    assert used.input_tokens + used.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )


def test_events_as_they_are_written(url, caplog):
    headers = {"X-Request-Id": "mine", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    body = BODY | {"stream": True, "temperature": 0} | OF_CLAUDE_CODE
    status, found, text = ask(url, "/v1/messages?beta=true", body, headers=headers)
    assert status == 200 and found["content-type"].startswith("text/event-stream")
    assert found["request-id"] == found["x-request-id"] == "mine"
    names = []
    for event in text.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        names.append(name.removeprefix("event: "))
        assert json.loads(data.removeprefix("data: "))["type"] == names[-1]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert b'"id":"msg_mine"' in text
    assert "without effect" not in caplog.text  # what is sent with every request is known


@pytest.mark.slow
def test_every_field_is_as_the_client_declares_it(url):
    body = BODY | {"tools": CLIENT_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 120}
    types.Message.model_validate(json.loads(ask(url, "/v1/messages", body)[2]))
    counted = json.loads(ask(url, "/v1/messages/count_tokens", body)[2])
    types.MessageTokensCount.model_validate(counted)


@pytest.mark.slow
def test_stop_reasons(client, llm):
    text = client.messages.create(**BODY, **GREEDY).content[0].text
    stopped = client.messages.create(**BODY, **GREEDY, stop_sequences=["zz", text[9:12]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[9:12])
    assert stopped.content[0].text == text[: text.index(text[9:12])]
    with client.messages.stream(**BODY, **GREEDY, stop_sequences=[text[9:12]]) as stream:
        last = stream.get_final_message()
    assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", text[9:12])
    ends = {str(llm.get_tokenizer().eos_token_id): 100.0}
    ended = client.messages.create(**BODY, extra_body={"logit_bias": ends})
    assert (ended.stop_reason, ended.content) == ("end_turn", [])
    long = [{"role": "user", "content": "the" + " the" * 1999}]
    full = client.messages.create(
        **BODY | {"messages": long, "max_tokens": 100}, extra_body={"ignore_eos": True}
    )
    assert full.stop_reason == "model_context_window_exceeded"
    used = full.usage
    assert used.input_tokens + used.cache_read_input_tokens + used.output_tokens == 2048


@pytest.mark.slow
def test_what_a_tool_returns_goes_back(client, chats):
    asked = BODY | {"tools": CLIENT_TOOLS, "max_tokens": 60}
    choice = {"type": "tool", "name": "weather"}
    first = client.messages.create(**asked, tool_choice=choice, extra_body={"seed": 2})
    (call,) = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "22 degrees"}
    turns = [*MESSAGES, first.to_param(), {"role": "user", "content": [result]}]
    second = client.messages.create(**asked | {"messages": turns}, **GREEDY)
    function = {"name": call.name, "arguments": json.dumps(call.input)}
    of_chat = {"id": "1", "type": "function", "function": function}
    chat = chats.create(
        model="demo", tools=TOOLS, max_tokens=60, temperature=0,
        messages=[
            *MESSAGES,
            {"role": "assistant", "tool_calls": [of_chat]},
            {"role": "tool", "tool_call_id": "1", "content": "22 degrees"},
        ],
    )  # fmt: skip
    assert second.content[0].text == chat.choices[0].message.content
    counted = client.messages.count_tokens(model="demo", messages=turns, tools=CLIENT_TOOLS)
    assert counted.input_tokens == chat.usage.prompt_tokens
    none = client.messages.create(**asked, tool_choice={"type": "none"}, **GREEDY)
    assert none.stop_reason != "tool_use"


@pytest.mark.slow
def test_an_answer_continues_the_assistant_s_last_message(client, chats):
    turns = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    answer = client.messages.create(**BODY | {"messages": turns}, **GREEDY)
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    chat = chats.create(
        model="demo", messages=turns, max_tokens=20, temperature=0, extra_body=goes_on
    )
    assert answer.content[0].text == chat.choices[0].message.content


@pytest.mark.slow
def test_thinking(client, monkeypatch):
    """By a model that is made to think: the demo's own does not."""
    thinking = ChatFormat(tool_parser="hermes", reasoning_parser="qwen3", special_tokens={})
    monkeypatch.setattr(InputProcessor, "chat_format", lambda self, template=None: thinking)
    regex = {"regex": "<think>[a-z ]{5,9}</think>[a-z]{3,5}"}
    asked = BODY | {"max_tokens": 60, "extra_body": {"structured_outputs": regex, "seed": 1}}
    asked |= {"thinking": {"type": "adaptive"}}
    whole = client.messages.create(**asked)
    thought, said = whole.content
    assert thought.type == "thinking" and 5 <= len(thought.thinking) <= 9 and thought.signature
    assert said.type == "text" and 3 <= len(said.text) <= 5
    with client.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_message()
    assert blocks(last) == blocks(whole) and {"thinking", "signature", "text"} <= kinds
    hidden = client.messages.create(
        **asked | {"thinking": {"type": "adaptive", "display": "omitted"}}
    )
    assert hidden.content[0].thinking == "" and hidden.content[1:] == [said]
    turns = [*MESSAGES, whole.to_param(), {"role": "user", "content": "And then?"}]
    assert client.messages.create(**BODY | {"messages": turns}).content


@pytest.mark.slow
def test_a_budget_applies_where_the_engine_knows_when_the_model_thinks(client, monkeypatch):
    asked = BODY | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    budgets = []

    def render(server, chat, inputs):
        budgets.append(chat.thinking_token_budget)
        return real(server, chat.model_copy(update={"thinking_token_budget": None}), inputs)

    real = messages_of_server.render
    monkeypatch.setattr(messages_of_server, "render", render)
    for known in (False, True):
        monkeypatch.setattr(messages_of_server, "has_markers", lambda _, known=known: known)
        assert client.messages.create(**asked).content
    assert budgets == [None, 1024]


class Weather(BaseModel):
    is_warm: bool


@pytest.mark.slow
def test_answers_fit_their_schema(client, compact):
    asked = BODY | {"max_tokens": 60, "extra_body": compact}
    parsed = client.messages.parse(**asked, output_format=Weather)
    assert isinstance(parsed.parsed_output, Weather)
    config = {"format": {"type": "json_schema", "schema": WEATHER}}
    answer = client.messages.create(**asked, output_config=config)
    jsonschema.validate(json.loads(answer.content[0].text), WEATHER)
    older = {"output_format": config["format"]} | compact
    answer = client.messages.create(**asked | {"extra_body": older})
    jsonschema.validate(json.loads(answer.content[0].text), WEATHER)


@pytest.mark.slow
def test_the_async_client_runs_many_at_once(url):
    async def run():
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:

            async def one(i: int) -> tuple[list[dict], list[dict]]:
                asked = BODY | {"messages": [{"role": "user", "content": f"{i} + 1 ="}]}
                asked |= {"max_tokens": 8, "extra_body": {"seed": i}}
                whole = await client.messages.create(**asked)
                async with client.messages.stream(**asked) as stream:
                    return blocks(whole), blocks(await stream.get_final_message())

            return await asyncio.gather(*(one(i) for i in range(20)))

    for whole, streamed in asyncio.run(run()):
        assert whole == streamed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens: Input should be greater"),
        ({"max_tokens": 2049}, anthropic.BadRequestError, "max_model_len=2048"),
        ({"model": "claude"}, anthropic.NotFoundError, "'claude' is not served here"),
        ({"messages": []}, anthropic.BadRequestError, "at least 1 item"),
        (
            {"messages": [{"role": "user", "content": "ab " * 5000}]},
            anthropic.BadRequestError,
            "maximum context length is 2048",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "bash_"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "needs tools"),
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError, "temperature"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_errors_are_of_the_client_s_classes(client, llm, change, error, message):
    num_steps = llm.stats().num_steps
    with pytest.raises(error) as caught:
        client.messages.create(**BODY | change)
    body = caught.value.body
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert message in body["error"]["message"] and body["error"].keys() == {"type", "message"}
    assert caught.value.request_id == body["request_id"] != ""
    assert llm.stats().num_steps == num_steps


@pytest.mark.slow
def test_counting_refuses_what_a_message_refuses(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="claude", messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="needs tools"):
        client.messages.count_tokens(model="demo", messages=MESSAGES, tool_choice={"type": "any"})
    many = client.messages.count_tokens(
        model="demo", messages=[{"role": "user", "content": "ab " * 5000}]
    )
    assert many.input_tokens > 2048  # what a client wants to know before it sends it


@pytest.mark.slow
def test_keys_are_taken_where_either_client_writes_them(llm):
    with serving(
        llm, api_key=("secret",), admin_api_key="boss", served_model_name=("demo",)
    ) as url:
        for given in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=url, max_retries=0, **given) as client:
                assert client.messages.create(**BODY).content
                assert client.models.list().data[0].id == "demo"
        with anthropic.Anthropic(base_url=url, max_retries=0, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**BODY)
            assert caught.value.type == "authentication_error"
        assert ask(url, "/resume", raw="", headers={"x-api-key": "secret"})[0] == 401
        assert ask(url, "/resume", raw="", headers={"x-api-key": "boss"})[0] == 200


@pytest.mark.slow
def test_a_server_that_is_full_or_dead_says_so(llm, monkeypatch):
    options = dict(served_model_name=("demo",), max_body_size=2000, max_queued_requests=-7)
    with (
        serving(llm, **options) as url,
        anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**BODY, system="x" * 3000)
        assert (caught.value.status_code, caught.value.type) == (413, "request_too_large")
        long = BODY | {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        with client.messages.stream(**long) as stream:  # of 8 rows one is left
            next(iter(stream))
            with pytest.raises(anthropic.OverloadedError) as caught:
                client.messages.create(**BODY)
            assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")
            assert caught.value.response.headers["retry-after"] == "1"
        wait_until(lambda: is_idle(llm))

        async def fail(*args, **kwargs):
            raise EngineDeadError("it is dead")

        monkeypatch.setattr(llm, "start_all", fail)
        with pytest.raises(anthropic.InternalServerError) as caught:
            client.messages.create(**BODY)
        assert (caught.value.status_code, caught.value.type) == (503, "api_error")


@pytest.mark.slow
def test_errors_within_a_stream_are_its_last_event(client, llm, monkeypatch):
    def fail(self, *args, **kwargs):
        raise RuntimeError("broken inside")

    monkeypatch.setattr(MessageOutput, "feed", fail)
    for ask_for in (lambda: list(client.messages.create(**BODY, stream=True)),
                    lambda: client.messages.create(**BODY)):  # fmt: skip
        with pytest.raises(anthropic.APIStatusError) as caught:
            ask_for()
        assert caught.value.type == "api_error" and "broken" not in str(caught.value.body)
        assert caught.value.body["request_id"] == caught.value.request_id
    wait_until(lambda: is_idle(llm))


@pytest.mark.slow
def test_a_request_that_is_aborted_is_an_error(url, client, llm):
    long = BODY | {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    stream = client.messages.create(**long, stream=True, extra_headers={"X-Request-Id": "one"})
    assert next(stream).message.id == "msg_one"
    found = ask(url, "/abort_requests", {"request_ids": ["msg_one"]})[2]
    assert json.loads(found) == {"aborted": 1}
    with pytest.raises(anthropic.APIStatusError, match="was aborted"):
        list(stream)
    wait_until(lambda: is_idle(llm))


@pytest.mark.slow
def test_a_client_that_goes_away_leaves_nothing(client, llm):
    long = BODY | {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with client.messages.stream(**long) as stream:
        next(iter(stream))
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.3).messages.create(**long)
    wait_until(lambda: is_idle(llm))


@pytest.mark.slow
def test_routes_are_in_the_schema_and_in_metrics(url):
    paths = json.loads(ask(url, "/openapi.json")[2])["paths"]
    assert {"/v1/messages", "/v1/messages/count_tokens"} <= set(paths)
    ask(url, "/v1/messages/count_tokens", BODY)
    label = 'handler="/v1/messages/count_tokens",method="POST",status="200"'
    assert metrics(url)[f"http_requests_total{{{label}}}"] >= 1
    status, _, text = ask(url, "/v1/messages/batches", {})
    assert status == 404 and json.loads(text)["error"]["type"] == "not_found_error"
