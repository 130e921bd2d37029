"""/v1/responses, by OpenAI's own client: chats as items, whole and as events, stored and continued."""

from __future__ import annotations

import asyncio
import functools
import json
import urllib.error
import urllib.request

import jsonschema
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from jaxpage.chat_outputs import ChatFormat
from jaxpage.input_processor import InputProcessor
from jaxpage.server.in_process import answerer
from jaxpage.server.response_output import ResponseOutput
from tests.test_chat_outputs import NAMED, TOOLS, WEATHER

INPUT = "Tell me a story."
FUNCTIONS = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
DEEP = functools.reduce(lambda inner, _: {"x": inner}, range(400), {})


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def outputs(response) -> list[dict]:
    """Without ids, which are new each time."""
    return [item.to_dict() | {"id": None, "call_id": None} for item in response.output]


def check_stream(events) -> Response:
    """The last response, which all events tell together."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == events[1].response.status == "in_progress"
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}"
    assert len({e.response.id for e in events if hasattr(e, "response")}) == 1
    for index, item in enumerate(last.output):
        of_item = [e for e in events if getattr(e, "output_index", None) == index]
        assert of_item[0].type == "response.output_item.added"
        assert of_item[0].item.id == item.id and of_item[0].item.status == "in_progress"
        assert of_item[-1].type == "response.output_item.done" and of_item[-1].item == item
        kinds = [e.type.removeprefix("response.") for e in of_item[1:-1]]
        deltas = "".join(e.delta for e in of_item if e.type.endswith(".delta"))
        if item.type == "function_call":
            name, text = "function_call_arguments", item.arguments
            assert of_item[-2].arguments == text
        else:
            name = "output_text" if item.type == "message" else "reasoning_text"
            (part,) = item.content
            text = part.text
            assert kinds.pop(0) == "content_part.added" and kinds.pop() == "content_part.done"
            assert of_item[-2].part.to_dict() == part.to_dict() and of_item[-3].text == text
        assert deltas == text
        assert set(kinds[:-1]) <= {f"{name}.delta"} and kinds[-1] == f"{name}.done"
    return last


def test_a_response_is_what_a_chat_says(client):
    asked = dict(model="demo", seed=3, temperature=0.9)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": INPUT}]
    chat = client.chat.completions.create(
        **asked, messages=messages, max_tokens=20, extra_body={"ignore_eos": True}
    )
    asked = dict(
        model="demo", temperature=0.9, max_output_tokens=20,
        extra_body={"seed": 3, "ignore_eos": True},
    )  # fmt: skip
    answer = client.responses.create(**asked, input=INPUT, instructions="Be brief.")
    assert answer.output_text == chat.choices[0].message.content != ""
    assert answer.object == "response" and answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.temperature, answer.max_output_tokens) == (0.9, 20)
    assert (answer.instructions, answer.model, answer.error) == ("Be brief.", "demo", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 20)
    assert usage.total_tokens == chat.usage.total_tokens
    assert usage.input_tokens_details.cached_tokens > 0  # the chat's
    assert usage.output_tokens_details.reasoning_tokens == 0
    parts = [{"type": "input_text", "text": INPUT}]
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
    ]
    again = client.responses.create(**asked, input=items)
    assert again.output_text == answer.output_text


@pytest.mark.parametrize(
    "include", [pytest.param([], marks=pytest.mark.slow), ["message.output_text.logprobs"]]
)
def test_events_say_what_the_whole_says(client, include):
    asked = dict(
        model="demo", input=INPUT, temperature=0, max_output_tokens=15, include=include,
        top_logprobs=2 if include else None,
    )  # fmt: skip
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    last = check_stream(events)
    assert outputs(last) == outputs(whole)
    assert last.usage.output_tokens == whole.usage.output_tokens == 15
    scores = whole.output[0].content[0].logprobs
    if include:
        chat = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": INPUT}], temperature=0,
            max_tokens=15, logprobs=True, top_logprobs=2,
        )  # fmt: skip
        expected = chat.choices[0].logprobs.content
        assert [s.to_dict() for s in scores] == [e.to_dict() for e in expected]
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        parts = [s.to_dict() for delta in deltas for s in delta.logprobs]
        assert parts == [s.to_dict() for s in scores]
    else:
        assert scores == []


def test_every_field_is_as_the_client_declares_it(client):
    """Strictly, where the client itself takes what it gets. And the events as they are written."""
    asked = dict(
        model="demo", input=INPUT, max_output_tokens=5, tools=FUNCTIONS, metadata={"a": "b"},
        tool_choice={"type": "function", "name": "weather"}, reasoning={"effort": "low"}, user="u",
        text={"format": {"type": "text"}, "verbosity": "low"}, extra_headers={"X-Request-Id": "mine"},
    )  # fmt: skip
    whole = client.responses.with_raw_response.create(**asked)
    body = json.loads(whole.text)
    assert whole.headers["x-request-id"] == "mine" and body["id"] == "resp_mine"
    Response.model_validate(body)
    assert body["metadata"] == {"a": "b"} and body["text"]["verbosity"] == "low"
    with client.responses.with_streaming_response.create(**asked, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.read().decode().split("\n\n")
    assert blocks.pop() == ""  # and no [DONE]
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        getattr(openai.types.responses, class_of(event["type"])).model_validate(event)


def class_of(event: str) -> str:
    words = event.replace("output_text", "text").removeprefix("response.").replace(".", "_")
    return "Response" + "".join(word.capitalize() for word in words.split("_")) + "Event"


def test_answers_fit_their_schema(client, compact):
    schema = {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}
    asked = dict(model="demo", input=INPUT, max_output_tokens=60)
    answer = client.responses.create(**asked, text={"format": schema}, extra_body=compact)
    jsonschema.validate(json.loads(answer.output_text), WEATHER)
    assert answer.status == "completed" and answer.text.format.name == "weather"
    answer = client.responses.create(**asked, text={"format": {"type": "json_object"}})
    assert answer.output_text.lstrip().startswith("{")
    choice = {"structured_outputs": {"choice": ["red", "green"]}}
    answer = client.responses.create(**asked, extra_body=choice)
    assert answer.output_text in ("red", "green")


class Weather(BaseModel):
    is_warm: bool


@pytest.mark.slow
def test_the_client_s_own_readers(client, compact):
    asked = dict(model="demo", input=INPUT, text_format=Weather, max_output_tokens=60)
    asked |= dict(extra_body=compact)
    parsed = client.responses.parse(**asked)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, Weather)
    assert "response.output_text.delta" in kinds


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param("required", marks=pytest.mark.slow),
        {"type": "function", "name": "weather"},
    ],
    ids=str,
)
def test_tools_that_must_be_called(client, choice):
    asked = dict(model="demo", input=INPUT, tools=FUNCTIONS, tool_choice=choice)
    asked |= dict(max_output_tokens=120, extra_body={"seed": 2})
    whole = client.responses.create(**asked)
    assert whole.status == "completed" and {item.type for item in whole.output} == {"function_call"}
    chat = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": INPUT}], tools=TOOLS, max_tokens=120, seed=2,
        tool_choice=choice if choice == "required" else NAMED,
    )  # fmt: skip
    expected = [(c.function.name, c.function.arguments) for c in chat.choices[0].message.tool_calls]
    assert [(call.name, call.arguments) for call in whole.output] == expected
    assert len({call.call_id for call in whole.output}) == len(whole.output)
    last = check_stream(list(client.responses.create(**asked, stream=True)))
    assert outputs(last) == outputs(whole)
    one = client.responses.create(**asked, parallel_tool_calls=False)
    assert len(one.output) == 1


@pytest.mark.slow
def test_what_a_function_returns_goes_back(client):
    """The client keeps the conversation, or the server does: the same prompt."""
    asked = dict(model="demo", tools=FUNCTIONS, max_output_tokens=60, extra_body={"seed": 2})
    first = client.responses.create(
        **asked, input=INPUT, tool_choice={"type": "function", "name": "weather"}, store=True
    )
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
    items = [{"role": "user", "content": INPUT}, call, result]
    kept_here = client.responses.create(**asked, input=items, temperature=0)
    kept_there = client.responses.create(
        **asked, input=[result], previous_response_id=first.id, temperature=0
    )
    assert kept_there.previous_response_id == first.id
    assert kept_there.output_text == kept_here.output_text != ""
    assert kept_there.usage.input_tokens == kept_here.usage.input_tokens
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        {"role": "user", "content": INPUT},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "22 degrees"},
    ]
    chat = client.chat.completions.create(
        model="demo", messages=messages, tools=TOOLS, max_tokens=60, temperature=0
    )
    assert chat.choices[0].message.content == kept_here.output_text


@pytest.mark.slow
def test_an_unfinished_message_is_completed(client):
    items = [
        {"role": "user", "content": INPUT},
        {"role": "assistant", "content": "Once upon", "status": "incomplete"},
    ]
    answer = client.responses.create(model="demo", input=items, temperature=0, max_output_tokens=9)
    chat = client.chat.completions.create(
        model="demo", messages=items, temperature=0, max_tokens=9,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )  # fmt: skip
    assert answer.output_text == chat.choices[0].message.content


@pytest.mark.slow
def test_reasoning_of_a_response(client, monkeypatch):
    """By a model that is made to think: the demo's own does not."""
    thinking = ChatFormat(tool_parser="hermes", reasoning_parser="qwen3", special_tokens={})
    monkeypatch.setattr(InputProcessor, "chat_format", lambda self, template=None: thinking)
    regex = {"regex": "<think>[a-z ]{5,9}</think>[a-z]{3,5}"}
    asked = dict(model="demo", input=INPUT, extra_body={"structured_outputs": regex, "seed": 1})
    asked |= dict(max_output_tokens=60, reasoning={"effort": "low"})
    whole = client.responses.create(**asked, store=True)
    thought, message = whole.output
    assert thought.type == "reasoning" and 5 <= len(thought.content[0].text) <= 9
    assert message.content[0].text == whole.output_text and len(whole.output_text) <= 5
    details = whole.usage.output_tokens_details
    assert 0 < details.reasoning_tokens < whole.usage.output_tokens
    last = check_stream(list(client.responses.create(**asked, stream=True)))
    assert outputs(last) == outputs(whole)
    after = client.responses.create(
        model="demo", input="And then?", previous_response_id=whole.id, max_output_tokens=1
    )
    assert after.usage.input_tokens > whole.usage.input_tokens


def test_errors_within_a_stream_are_its_last_event(client, monkeypatch):
    def fail(self, *args, **kwargs):
        raise RuntimeError("broken inside")

    monkeypatch.setattr(ResponseOutput, "feed", fail)
    *_, last = client.responses.create(model="demo", input=INPUT, stream=True, store=True)
    assert last.type == "response.failed" and last.response.error.code == "server_error"
    assert "broken inside" not in last.response.error.message
    assert client.responses.retrieve(last.response.id).status == "failed"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="demo", input=INPUT)


@pytest.mark.slow
def test_prompts_that_are_too_long_may_lose_their_beginning(client):
    words = " ".join(str(i) for i in range(3000))
    asked = dict(model="demo", input=words, max_output_tokens=5)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048"):
        client.responses.create(**asked)
    answer = client.responses.create(**asked, truncation="auto", extra_body={"ignore_eos": True})
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2043, 5)
    longer = asked | {"input": words * 4}  # more characters than 2048 of the longest tokens
    answer = client.responses.create(**longer, truncation="auto")
    assert answer.usage.input_tokens == 2043


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        (dict(input=[]), "input", "at least 1 item"),
        (dict(input=[{"type": "item_reference", "id": "x"}]), "input", "must be of type message"),
        (dict(input=[{"role": "user", "content": [{"type": "input_file"}]}]), "input", "input_image"),
        (dict(input=[{"role": "user", "content": [{"type": "input_image"}]}]), "input", "image_url"),
        (
            dict(input=[{"role": "system", "content": [IMAGE]}]),
            "input",
            "input_image is for messages of role user, not system",
        ),
        (dict(input=[{"role": "user", "content": [IMAGE]}]), None, "only text"),
        (dict(input=[{"role": "nobody", "content": "x"}]), "input", "'user'"),
        (
            dict(input=[{"type": "function_call_output", "call_id": "q", "output": "x"}]),
            "input",
            "call 'q'",
        ),
        (dict(input=[{"role": "user", "content": "ab" * 10**6}]), "input_text", "2000000 characters"),
        (dict(background=True), "background", "stream=true"),
        (dict(tool_choice="required"), "tool_choice", "needs tools"),
        (dict(tool_choice="often", tools=FUNCTIONS), "tool_choice", "'required'"),
        (dict(tool_choice={"type": "function", "name": "x"}, tools=FUNCTIONS), "tool_choice", "'x'"),
        (dict(tools=[{"type": "web_search"}]), "tools", "'function'"),
        (dict(tools=[{"type": "function", "name": "a b"}], tool_choice="required"), None, "name of tool 0"),
        (dict(text={"format": {"type": "xml"}}), "text", "json_schema"),
        (dict(text={"format": {"type": "json_schema", "name": "x"}}), "text", "schema"),
        (dict(temperature=3.0), "temperature", "in [0, 2], got 3.0"),
        (dict(max_output_tokens=0), "max_output_tokens", "greater than or equal to 1"),
        (dict(max_output_tokens=2049), "max_output_tokens", "cannot be greater than max_model_len=2048"),
        (dict(reasoning={"effort": "much"}), "reasoning", "'none', 'minimal', 'low'"),
        (dict(top_logprobs=3), "top_logprobs", "include"),
        (dict(metadata={"k": "v" * 513}), "metadata", "512"),
        (dict(conversation="conv_1"), "conversation", "previous_response_id"),
        (dict(prompt={"id": "pmpt_1"}), "prompt", "instructions"),
        (dict(tools=[FUNCTIONS[0] | {"parameters": DEEP}]), None, "repeat"),
        (dict(extra_body={"request_id": "a b"}), "request_id", "match"),
        (dict(extra_body={"truncate_prompt_tokens": -5}), "truncate_prompt_tokens", "-5"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_impossible_values_are_400_with_the_field_named(client, llm, change, param, message):
    num_steps = llm.stats().num_steps
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**({"model": "demo", "input": INPUT} | change))
    body = caught.value.body
    assert message in body["message"] and body["code"] == 400
    assert body["param"] == param
    assert llm.stats().num_steps == num_steps


@pytest.mark.parametrize(
    "change", [{"user": "\ud800"}, {"input": [{"role": "user", "content": "x", "id": "\ud800"}]}]
)
def test_what_no_answer_can_repeat_is_400(url, change):
    """Python's client cannot write it, JSON can."""
    data = json.dumps({"model": "demo", "input": INPUT} | change).encode()
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/responses", data, headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked)
    with caught.value as answer:
        assert answer.status == 400 and "surrogates" in json.load(answer)["error"]["message"]


@pytest.mark.slow
def test_the_async_client_runs_many_at_once(url):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:

            async def ask(i: int) -> tuple[str, str]:
                asked = dict(model="demo", input=f"{i} + 1 =", max_output_tokens=8)
                asked |= dict(extra_body={"seed": i})
                whole = await client.responses.create(**asked)
                stream = await client.responses.create(**asked, stream=True)
                return whole.output_text, check_stream([e async for e in stream]).output_text

            return await asyncio.gather(*(ask(i) for i in range(20)))

    for whole, streamed in asyncio.run(run()):
        assert whole == streamed


def test_the_same_without_http(llm):
    answer = answerer(llm)
    status, body = asyncio.run(answer("/v1/responses", {"input": INPUT, "max_output_tokens": 3}))
    assert status == 200 and Response.model_validate(body).usage.output_tokens == 3
    status, body = asyncio.run(answer("/v1/embeddings", {"input": INPUT}))
    assert status == 400 and "/v1/embeddings is for models that embed" in body["error"]["message"]
