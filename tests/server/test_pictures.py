"""Pictures in /v1/chat/completions, /v1/responses and /v1/messages: parts, limits, and errors that name the field."""

from __future__ import annotations

import json
import urllib.request

import anthropic
import openai
import pytest

from jaxpage.async_llm import AsyncLLM
from jaxpage.demo import checkpoint
from jaxpage.server.options import ServerOptions
from tests import fake_vision
from tests.fake_vision import pixels
from tests.few_programs import few_programs
from tests.pictures.test_reader import data_url
from tests.server.conftest import serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seeing():
    with few_programs(), fake_vision.registered():
        llm = AsyncLLM(
            str(checkpoint()),
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes="16M",
            dtype="float32",
            limit_mm_per_prompt={"image": 2},
            chat_template=fake_vision.TEMPLATE,
            **fake_vision.OPTIONS,
        )
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def client(seeing):
    assert ServerOptions().max_body_size > 2**20
    with (
        serving(seeing, served_model_name=("demo",)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, *parts, **options):
    content = [{"type": "text", "text": "What is it?"}, *parts]
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        **({"temperature": 0, "max_tokens": 8} | options),
    )


def image(number: int) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(pixels(number))}}


def test_a_picture_is_seen_and_encoded_once(client, seeing):
    before = seeing.stats().num_encoded_pictures
    answers = [ask(client, image(n), logprobs=True) for n in (1, 2, 1)]
    first, other, again = [[t.logprob for t in a.choices[0].logprobs.content] for a in answers]
    assert first == pytest.approx(again, abs=1e-4)
    assert first != pytest.approx(other, abs=1e-3)
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens
    assert seeing.stats().num_encoded_pictures == before + 2
    text = ask(client)
    assert text.usage.prompt_tokens == answers[0].usage.prompt_tokens - 6


def test_streams_and_several_pictures(client):
    whole = ask(client, image(3), image(4))
    chunks = list(ask(client, image(3), image(4), stream=True))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content


def test_responses_see_pictures_and_so_do_those_that_continue_them(client, seeing):
    content = [{"type": "input_text", "text": "What is it?"}]
    picture = {"type": "input_image", "image_url": data_url(pixels(1)), "detail": "low"}
    options = {"model": "demo", "temperature": 0, "max_output_tokens": 8, "store": True}
    turn = [{"role": "user", "content": [*content, picture]}]
    first = client.responses.create(input=turn, **options)
    chat = ask(client, image(1))
    assert first.output_text == chat.choices[0].message.content
    assert first.usage.input_tokens == chat.usage.prompt_tokens
    assert (
        first.output_text
        != client.responses.create(input=content[0]["text"], **options).output_text
    )
    items = client.responses.input_items.list(first.id).data
    assert [part.to_dict() for part in items[0].content] == [content[0], picture]
    before = seeing.stats().num_encoded_pictures
    second = client.responses.create(input="And?", previous_response_id=first.id, **options)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert seeing.stats().num_encoded_pictures == before
    for url, message in (("file:///c", "allowed_local_media_path"), ("data:,x", "data URL")):
        wrong = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(input=wrong, **options)
        body = caught.value.body
        assert body["param"] == "input" and message in body["message"]
        assert "messages[0].content[0]: " in body["message"]


def test_messages_see_pictures_and_so_do_those_in_the_results_of_tools(client):
    def picture(address: str) -> dict:
        kind, data = address.removeprefix("data:").split(";base64,")
        source = {"type": "base64", "media_type": kind, "data": data}
        return {"type": "image", "source": source}

    options = {"model": "demo", "max_tokens": 8, "extra_body": {"temperature": 0}}
    question = {"type": "text", "text": "What is it?"}
    shown = picture(data_url(pixels(1)))
    url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as messages:
        turn = [{"role": "user", "content": [question, shown]}]
        answer = messages.messages.create(messages=turn, **options)
        chat = ask(client, image(1))
        assert answer.content[0].text == chat.choices[0].message.content
        counted = messages.messages.count_tokens(model="demo", messages=turn).input_tokens
        assert counted == chat.usage.prompt_tokens
        use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": [question, shown]}
        turns = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        seen = messages.messages.count_tokens(model="demo", messages=turns).input_tokens
        turns[-1] = {"role": "user", "content": [result | {"content": [question]}]}
        assert seen >= messages.messages.count_tokens(model="demo", messages=turns).input_tokens + 6
        wrong = {"type": "image", "source": {"type": "url", "url": "file:///c"}}
        with pytest.raises(anthropic.BadRequestError, match="allowed_local_media_path") as caught:
            messages.messages.create(messages=[{"role": "user", "content": [wrong]}], **options)
        assert "messages, as messages of a chat: messages[0]" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "http://a.b/c.png"}}, "allowed_media_domains"),
        ({"type": "image_url", "image_url": {"url": "file:///c"}}, "allowed_local_media_path"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}, "no picture"),
        ({"type": "image_url"}, 'must have "image_url"'),
        ({"type": "image_pil", "image_pil": 5}, "got int"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "not supported"),
    ],
)
def test_what_is_no_picture_is_an_error_that_names_the_field(client, seeing, part, message):
    steps = seeing.stats().num_steps
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, part)
    body = caught.value.body
    assert (body["param"], body["code"]) == ("messages", 400)
    assert body["message"].startswith("messages[0].content[1]: ") and message in body["message"]
    assert seeing.stats().num_steps == steps


def test_more_pictures_than_allowed_are_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, image(1), image(2), image(3))
    assert "may have 2 of kind 'image'" in caught.value.body["message"]
    assert caught.value.body["param"] == "messages"


def test_the_tokenizer_counts_placeholders(client, seeing):
    content = [{"type": "text", "text": "What is it?"}, image(1)]
    body = {"messages": [{"role": "user", "content": content}]}
    url = str(client.base_url).replace("/v1/", "/tokenize")
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    assert found["count"] == ask(client, image(1)).usage.prompt_tokens
