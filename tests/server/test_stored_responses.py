"""Responses that are stored: continued, shown, cancelled, and forgotten when there are too many."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.server.conftest import serving

INPUT = "Tell me a story."
ENDLESS = {"model": "demo", "input": INPUT, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.slow
def test_conversations_are_continued_and_shown(client):
    asked = dict(model="demo", temperature=0, max_output_tokens=8, store=True)
    first = client.responses.create(**asked, input="1 + 1 =", instructions="Count.")
    second = client.responses.create(**asked, input="2 + 2 =", previous_response_id=first.id)
    third = client.responses.create(**asked, input="3 + 3 =", previous_response_id=second.id)
    messages = [
        {"role": "user", "content": "1 + 1 ="},  # instructions are of one response only
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "2 + 2 ="},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "3 + 3 ="},
    ]
    chat = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_tokens=8
    )
    assert third.output_text == chat.choices[0].message.content
    assert client.responses.retrieve(third.id) == third
    newest_first = list(client.responses.input_items.list(third.id, limit=2))
    assert [item.content[0].text for item in newest_first] == [m["content"] for m in messages[::-1]]
    page = client.responses.input_items.list(third.id, limit=3, order="asc")
    assert page.has_more and [item.role for item in page.data] == ["user", "assistant", "user"]
    assert client.responses.delete(second.id) is None
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    again = client.responses.create(**asked, input="4 + 4 =", previous_response_id=third.id)
    assert again.usage.input_tokens > third.usage.input_tokens


@pytest.mark.slow
def test_nothing_is_stored_unless_asked_and_no_more_than_may_be(llm):
    with serving(llm, max_stored_responses=2) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        ask = dict(model="checkpoint", input=INPUT, max_output_tokens=1)
        plain = client.responses.create(**ask)
        assert plain.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError, match="store=true"):
            client.responses.retrieve(plain.id)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(**ask, previous_response_id=plain.id)
        assert caught.value.body["param"] == "previous_response_id"
        first, second = (client.responses.create(**ask, store=True).id for _ in range(2))
        client.responses.retrieve(first)  # used more recently
        third = client.responses.create(**ask, store=True).id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second)
        assert {client.responses.retrieve(i).id for i in (first, third)} == {first, third}
        with pytest.raises(openai.BadRequestError, match="choose another"):
            client.responses.create(**ask, store=True, extra_headers={"X-Request-Id": third[5:]})
        client.close()
    with serving(llm, max_stored_responses=0) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="max-stored-responses"):
            client.responses.create(**ask, store=True)
        client.close()


def test_a_running_response_is_cancelled(client, llm):
    stream = client.responses.create(**ENDLESS, stream=True, store=True)
    events = [next(stream) for _ in range(6)]
    response_id = events[0].response.id
    assert client.responses.retrieve(response_id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.responses.create(model="demo", input="x", previous_response_id=response_id)
    assert client.responses.cancel(response_id).status == "cancelled"
    events += list(stream)
    last = events[-1].response
    assert events[-1].type == "response.incomplete" and last.status == "cancelled"
    assert last.output[0].status == "incomplete" and last.output_text
    assert 0 < last.usage.output_tokens < 1500
    stored = client.responses.retrieve(response_id)
    assert (stored.status, stored.output_text) == ("cancelled", last.output_text)
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(response_id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_x")


@pytest.mark.slow
def test_a_client_that_goes_away_leaves_nothing(client, llm):
    stream = client.responses.create(**ENDLESS, stream=True, store=True)
    response_id = next(stream).response.id
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).responses.create(**ENDLESS)

    async def until_empty():
        async with asyncio.timeout(20):
            while llm.stats().num_running or llm.stats().num_blocks_used:
                await asyncio.sleep(0.01)

    asyncio.run(until_empty())
    assert client.responses.retrieve(response_id).status == "cancelled"


def test_stored_responses_are_asked_for_in_possible_ways(client):
    stored = client.responses.create(model="demo", input=INPUT, store=True, max_output_tokens=1).id
    with pytest.raises(openai.BadRequestError, match="come whole"):
        client.responses.retrieve(stored, stream=True)
    with pytest.raises(openai.BadRequestError, match="less than or equal to 100"):
        client.responses.input_items.list(stored, limit=1000)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(stored, after="msg_x")
    assert caught.value.body["param"] == "after"
    with pytest.raises(openai.NotFoundError, match="gpt-x"):
        client.responses.create(model="gpt-x", input=INPUT)
