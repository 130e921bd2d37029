"""/v1/completions and /v1/chat/completions, by OpenAI's own client: the answers of the engine, whole and in pieces."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import openai
import pytest
from tokenizers.processors import TemplateProcessing

from jaxpage import SamplingParams
from jaxpage.outputs import Logprob
from jaxpage.server.logprobs import completion_logprobs
from jaxpage.server.protocol.chat import ChatRequest
from jaxpage.server.protocol.pooling import POOLING_PATHS
from tests.server.conftest import serving
from tests.server.test_operation import ask, error_of
from tests.test_chat_outputs import NAMED, TOOLS, WEATHER

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
BAD_TAG = {"structures": [{"begin": 1}], "triggers": ["a"]}


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def engine_says(llm, prompt, **params):
    return llm.submit(prompt, SamplingParams(**params)).result(60)


def joined(chunks) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            texts[choice.index] = texts.get(choice.index, "") + text
    return texts


def test_a_text_is_continued_as_by_the_engine(client, llm):
    answer = client.completions.create(model="demo", prompt=PROMPT, temperature=0)
    (expected,) = engine_says(llm, PROMPT, temperature=0, max_tokens=16).outputs
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason == "length"
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.model == "demo"
    usage = answer.usage
    assert usage.completion_tokens == 16
    assert usage.total_tokens == usage.prompt_tokens + 16


def test_streams_say_what_whole_answers_say(client):
    asked = dict(
        model="demo", prompt=[PROMPT, "3 + 4 ="], n=3, seed=1, temperature=0.8, max_tokens=20
    )
    whole = client.completions.create(**asked)
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert joined(chunks) == {c.index: c.text for c in whole.choices}
    assert [c.index for c in whole.choices] == list(range(6))
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert len(ends) == 6
    assert len({chunk.id for chunk in chunks}) == 1


def test_every_form_of_a_prompt(client, llm):
    ids = llm.get_tokenizer()(PROMPT)["input_ids"]
    forms = [PROMPT, [PROMPT], ids, [ids]]
    answers = [
        client.completions.create(model="demo", prompt=p, temperature=0, max_tokens=5)
        for p in forms
    ]
    assert len({a.choices[0].text for a in answers}) == 1


@pytest.mark.slow
def test_what_a_harness_scores(client, llm):
    """Ids in, their logprobs out: `echo` with `logprobs`, with and without a new token."""
    ids = llm.get_tokenizer()(PROMPT)["input_ids"]
    (entries,) = [
        engine_says(llm, ids, max_tokens=1, temperature=0, prompt_logprobs=1).prompt_logprobs
    ]
    for max_tokens in (1, 0):
        answer = client.completions.create(
            model="demo", prompt=[ids], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        found = answer.choices[0].logprobs
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        for i, token_id in enumerate(ids[1:], 1):
            assert found.token_logprobs[i] == pytest.approx(entries[i][token_id].logprob, abs=1e-5)
            assert max(found.top_logprobs[i].values()) == pytest.approx(
                max(e.logprob for e in entries[i].values()), abs=1e-5
            )
        assert len(found.tokens) == len(ids) + max_tokens
        assert "".join(found.tokens) == answer.choices[0].text
        assert found.text_offset == [
            sum(map(len, found.tokens[:i])) for i in range(len(found.tokens))
        ]
        assert answer.usage.completion_tokens == max_tokens


@pytest.mark.slow
def test_streamed_logprobs_are_those_of_the_whole(client):
    asked = dict(model="demo", prompt=PROMPT, logprobs=2, echo=True, temperature=0, max_tokens=9)
    whole = client.completions.create(**asked).choices[0]
    chunks = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [x for c in chunks for x in getattr(c.logprobs, name)]
        assert parts == getattr(whole.logprobs, name), name
    assert "".join(c.text for c in chunks) == whole.text


@pytest.mark.slow
def test_the_echo_of_a_truncated_prompt_is_what_was_read(client, llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer(PROMPT)["input_ids"]
    for prompt in (PROMPT, ids):
        asked = dict(model="demo", prompt=prompt, echo=True, logprobs=0, max_tokens=1)
        cut = {"truncate_prompt_tokens": 2, "return_token_ids": True}
        choice = client.completions.create(**asked, extra_body=cut).choices[0]
        assert choice.prompt_token_ids == ids[-2:]
        assert choice.logprobs.tokens[:2] == [tokenizer.decode([i]) for i in ids[-2:]]
        assert choice.text == "".join(choice.logprobs.tokens)
    for length in (len(ids), 99):
        whole = client.completions.create(
            **asked | {"prompt": PROMPT}, extra_body=cut | {"truncate_prompt_tokens": length}
        )
        assert whole.choices[0].text.startswith(PROMPT)


@pytest.fixture
def bos(llm):
    """While this is in use, texts begin with this token."""
    tokenizer = llm.get_tokenizer()
    token = tokenizer.eos_token
    usual = tokenizer.backend_tokenizer.post_processor
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.eos_token_id)]
    )
    yield tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = usual


ECHOES = [
    ({}, PROMPT),
    ({"truncate_prompt_tokens": 99}, PROMPT),
    ({"truncate_prompt_tokens": 3}, slice(-2, None)),
    ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
    ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(1, 3)),
    ({"truncate_prompt_tokens": 1}, slice(0, 0)),
    ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, slice(-3, None)),
]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("cut", "kept"), ECHOES)
def test_an_echo_has_no_bos_and_offsets_are_those_of_its_text(client, llm, bos, cut, kept, stream):
    tokenizer = llm.get_tokenizer()
    whole = tokenizer(PROMPT)["input_ids"]
    asked = dict(model="demo", prompt=PROMPT, echo=True, logprobs=0, max_tokens=2, temperature=0)
    more = {"min_tokens": 2} | cut  # no EOS, which has no text
    answer = client.completions.create(**asked, stream=stream, extra_body=more)
    choices = [c.choices[0] for c in (answer if stream else [answer])]
    text = "".join(choice.text for choice in choices)
    tokens, offsets = (
        [x for choice in choices for x in getattr(choice.logprobs, name)]
        for name in ("tokens", "text_offset")
    )
    assert text.startswith(kept if isinstance(kept, str) else tokenizer.decode(whole[kept]))
    num_unseen = int(tokens[0] == tokenizer.decode([bos]))
    assert num_unseen == (cut.get("truncation_side") != "left" and "add_special_tokens" not in cut)
    assert "".join(tokens[num_unseen:]) == text
    assert all(
        text[offset:].startswith(token)
        for token, offset in list(zip(tokens, offsets, strict=True))[num_unseen:]
    )
    assert offsets[0] == 0 and offsets == sorted(offsets)


def test_an_echo_has_the_special_tokens_of_the_text(client, bos, llm):
    """Only those that the tokenizer adds are no part of it."""
    special = llm.get_tokenizer().decode([bos])
    text = f"{special}{PROMPT}"
    for length, side in ((3, "right"), (99, None)):
        cut = {"truncate_prompt_tokens": length, "truncation_side": side}
        asked = dict(model="demo", echo=True, logprobs=0, max_tokens=1)
        choice = client.completions.create(**asked, prompt=text, extra_body=cut).choices[0]
        assert choice.logprobs.tokens[:2] == [special, special]
        assert choice.text == "".join(choice.logprobs.tokens[1:])


def prompt_ids(client, **cut) -> list[int]:
    more = {"truncate_prompt_tokens": 3, "return_token_ids": True, **cut}
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=1, extra_body=more)
    return answer.choices[0].prompt_token_ids


def test_what_truncation_keeps(client, llm, bos):
    whole = llm.get_tokenizer()(PROMPT)["input_ids"]
    assert whole[0] == bos and len(whole) > 4
    assert prompt_ids(client) == [bos, *whole[-2:]]
    assert prompt_ids(client, truncation_side="left") == whole[-3:]
    assert prompt_ids(client, truncation_side="right") == whole[:3]
    assert prompt_ids(client, truncate_prompt_tokens=len(whole)) == whole
    chat = dict(model="demo", messages=MESSAGES, max_tokens=1)
    read = client.chat.completions.create(**chat, extra_body={"return_token_ids": True})
    for side, kept in ((None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))):
        cut = {"return_token_ids": True, "truncate_prompt_tokens": 3, "truncation_side": side}
        found = client.chat.completions.create(**chat, extra_body=cut)
        assert found.prompt_token_ids == read.prompt_token_ids[kept]


def test_tokens_without_text_are_named_by_their_ids():
    """As with --skip-tokenizer-init; a token inside a character has a text, which is empty."""
    entries = [None, {5: Logprob(-1.0), 6: Logprob(-2.0)}]
    found = completion_logprobs([4, 5], entries, as_ids=False)
    assert found["tokens"] == ["token_id:4", "token_id:5"] and found["text_offset"] == [0, 10]
    assert found["top_logprobs"] == [None, {"token_id:5": -1.0, "token_id:6": -2.0}]
    inside = [None, {5: Logprob(-1.0, 1, "")}]
    found = completion_logprobs([4, 5], inside, as_ids=False, unscored="")
    assert found["tokens"] == ["", ""]


@pytest.mark.slow
def test_texts_of_any_length_may_be_truncated(client):
    text = f"{PROMPT} there was a cat. " * 2000
    asked = dict(model="demo", max_tokens=1)
    cut = client.completions.create(**asked, prompt=text, extra_body={"truncate_prompt_tokens": 20})
    assert cut.usage.prompt_tokens == 20
    cut = client.chat.completions.create(
        **asked,
        messages=[{"role": "user", "content": text}],
        extra_body={"truncate_prompt_tokens": -1},
    )
    assert cut.usage.prompt_tokens == 2047


@pytest.mark.slow
def test_vllm_s_extras(client, llm):
    extra = {
        "top_k": 3, "min_tokens": 4, "return_token_ids": True, "stop_token_ids": [9],
        "prompt_logprobs": 1, "vllm_xargs": {"a": 1}, "cache_salt": "s", "repetition_penalty": 1.1,
    }  # fmt: skip
    answer = client.completions.create(
        model="other-name", prompt=PROMPT, seed=4, max_tokens=6, extra_body=extra
    )
    choice = answer.choices[0]
    expected = engine_says(
        llm, PROMPT, seed=4, max_tokens=6, top_k=3, min_tokens=4, stop_token_ids=[9],
        repetition_penalty=1.1,
    )  # fmt: skip
    assert choice.token_ids == expected.outputs[0].token_ids
    assert choice.prompt_token_ids == expected.prompt_token_ids
    assert choice.prompt_logprobs[0] is None and choice.prompt_logprobs[1]


def test_a_conversation_is_continued(client, llm):
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_completion_tokens=12, max_tokens=3
    )
    message = answer.choices[0].message

    async def chat():
        params = SamplingParams(temperature=0, max_tokens=12)
        return [o async for o in llm.chat(MESSAGES, params)][-1]

    assert message.content == asyncio.run(chat()).outputs[0].text
    assert message.role == "assistant" and not message.tool_calls
    assert answer.usage.completion_tokens == 12  # max_completion_tokens wins
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, max_tokens=12, stream=True
        )
    )
    assert joined(chunks) == {0: message.content}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_echo_is_of_a_last_message_with_the_answer_s_role(client):
    asked = dict(model="demo", temperature=0, max_tokens=4)
    told = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "It was"}]}]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}

    def said(messages, **extra) -> tuple[str, str]:
        """Role and text, which a stream has too."""
        chat = dict(**asked, messages=messages, extra_body=extra)
        message = client.chat.completions.create(**chat).choices[0].message
        chunks = list(client.chat.completions.create(**chat, stream=True))
        assert chunks[0].choices[0].delta.role == message.role
        assert joined(chunks) == {0: message.content}
        return message.role, message.content

    assert said(MESSAGES, echo=True) == said(MESSAGES)
    role, text = said(told, **goes_on)
    assert role == "assistant" and said(told, echo=True, **goes_on) == (role, "It was" + text)
    role, text = said(MESSAGES, add_generation_prompt=False)
    echoed = said(MESSAGES, echo=True, add_generation_prompt=False)
    assert role == "user" and echoed == (role, MESSAGES[0]["content"] + text)


@pytest.mark.parametrize(
    ("effort", "given", "thinks"),
    [
        ("low", None, True),
        ("none", None, False),
        ("none", {"enable_thinking": True}, True),
        (None, None, None),
    ],
)
def test_reasoning_effort_turns_thinking_on_and_off(effort, given, thinks):
    body = ChatRequest(messages=MESSAGES, reasoning_effort=effort, chat_template_kwargs=given)
    options = body.template_options(trust_template=False, defaults=None)["chat_template_kwargs"]
    assert options.get("enable_thinking") is thinks and options.get("reasoning_effort") == effort
    defaults = {"enable_thinking": True}
    options = body.template_options(trust_template=False, defaults=defaults)
    assert options["chat_template_kwargs"]["enable_thinking"] is (thinks is not False)


def test_null_is_the_default(client):
    nulls = {"return_token_ids": None, "return_tokens_as_token_ids": None, "max_tokens": None}
    for stream_options in ({}, None):
        answer = client.completions.create(
            model="demo", prompt=PROMPT, stream_options=stream_options,
            extra_body={**nulls, "ignore_eos": True},
        )  # fmt: skip
        assert answer.usage.completion_tokens == 16
    options = {"include_usage": None, "continuous_usage_stats": None}
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=MESSAGES, stream=True, stream_options=options,
            extra_body=nulls | {"max_tokens": 2},
        )
    )  # fmt: skip
    assert chunks[-1].choices[0].finish_reason == "length"


def test_continuous_usage_counts_what_was_sent(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=5, stream=True, stream_options=options
        )
    )
    first, *_, last = counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert first == 0 and counts[1] > 0 and sorted(counts) == counts
    assert all(
        c.usage.total_tokens == c.usage.prompt_tokens + n
        for c, n in zip(chunks, counts, strict=True)
    )
    assert chunks[0].usage.prompt_tokens == chunks[-1].usage.prompt_tokens > 0 and last <= 5


def test_whole_answers_have_vllm_s_fields_as_null(client):
    chat = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1)
    text = client.completions.create(model="demo", prompt=PROMPT, max_tokens=1)
    message = chat.choices[0].message.to_dict()
    assert message.keys() == {
        "role", "content", "refusal", "annotations", "audio", "function_call", "reasoning",
    }  # fmt: skip
    for answer in (chat, text):
        fields = answer.to_dict()
        assert {"service_tier", "system_fingerprint", "kv_transfer_params"} <= fields.keys()
        assert fields["usage"]["completion_tokens_details"] is None
        assert fields["usage"]["prompt_tokens_details"] is None
        assert answer.kv_transfer_params is None and answer.choices[0].token_ids is None
    assert chat.prompt_logprobs is chat.prompt_token_ids is None
    assert text.choices[0].prompt_logprobs is text.choices[0].prompt_token_ids is None


@pytest.mark.slow
def test_chat_logprobs_whole_and_streamed(client):
    asked = dict(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(whole) == 6
    for entry in whole:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)  # greedy
        assert bytes(entry.bytes).decode() == entry.token
    chunks = client.chat.completions.create(**asked, stream=True)
    parts = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert parts == whole


@pytest.mark.slow
def test_answers_fit_their_schema(client, compact):
    answer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": WEATHER, "strict": True},
        },
        extra_body=compact,
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), WEATHER)
    answer = client.completions.create(
        model="demo",
        prompt=PROMPT,
        extra_body={"structured_outputs": {"choice": ["red", "green"]}},
    )
    assert answer.choices[0].text in ("red", "green")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tools_that_must_be_called(client, choice):
    asked = dict(
        model="demo", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=120, seed=2
    )
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    (call, *_) = whole.message.tool_calls
    assert call.id and call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        jsonschema.validate(arguments, WEATHER)
    calls: dict[int, list[str]] = {}
    reason = None
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or ():
            if delta.function.name:
                assert delta.id and delta.index not in calls
                calls[delta.index] = [delta.function.name, ""]
            calls[delta.index][1] += delta.function.arguments or ""
    assert reason == whole.finish_reason
    assert list(calls.values()) == [
        [c.function.name, c.function.arguments] for c in whole.message.tool_calls
    ]
    one = client.chat.completions.create(**asked, parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1


def num_prompt_tokens(client, **more) -> int:
    asked = dict(model="demo", messages=MESSAGES, max_tokens=1, **more)
    return client.chat.completions.create(**asked).usage.prompt_tokens


def test_the_model_sees_tools_that_it_may_not_call(llm):
    seen = {"chat_template": "{{ messages[0].content }}{{ tools }}"}
    options = dict(trust_request_chat_template=True, served_model_name=("demo",))
    with serving(llm, **options) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        some = num_prompt_tokens(client, tools=TOOLS, tool_choice="auto", extra_body=seen)
        assert num_prompt_tokens(client, tools=TOOLS, tool_choice="none", extra_body=seen) == some
    options["exclude_tools_when_tool_choice_none"] = True
    with serving(llm, **options) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        none = num_prompt_tokens(client, extra_body=seen)
        assert num_prompt_tokens(client, tools=TOOLS, tool_choice="auto", extra_body=seen) == some
        assert num_prompt_tokens(client, tools=TOOLS, tool_choice="none", extra_body=seen) == none


def test_a_tool_that_must_be_called_wins_over_a_format(client):
    asked = dict(model="demo", messages=MESSAGES, tools=TOOLS, max_tokens=120, seed=2)
    json_object, one = {"type": "json_object"}, {"structured_outputs": {"choice": ["x"]}}
    for choice, more in (
        ("required", {"response_format": json_object}),
        (NAMED, {"response_format": json_object}),
        ("required", {"extra_body": one}),
    ):
        answer = client.chat.completions.create(**asked, tool_choice=choice, **more)
        assert answer.choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError, match="leave one out"):
        client.chat.completions.create(**asked, tool_choice=NAMED, extra_body=one)


def test_tools_that_cannot_be_forced_may_be_offered(client):
    asked = dict(model="demo", messages=MESSAGES, max_tokens=1)
    for function in ({"name": "my tool"}, {"name": "f", "parameters": {"type": "array"}}):
        tools = [{"type": "function", "function": function}]
        assert client.chat.completions.create(**asked, tools=tools, tool_choice="auto").choices
        with pytest.raises(openai.BadRequestError, match="of tool"):
            client.chat.completions.create(**asked, tools=tools, tool_choice="required")
    assert client.chat.completions.create(**asked, tools=[*TOOLS, *TOOLS]).choices


@pytest.mark.slow
def test_the_async_client_runs_many_at_once(url, llm):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            return await asyncio.gather(
                *(
                    client.completions.create(
                        model="demo", prompt=f"{i} + 1 =", seed=i, max_tokens=8
                    )
                    for i in range(40)
                )
            )

    answers = asyncio.run(run())
    for i, answer in enumerate(answers):
        expected = engine_says(llm, f"{i} + 1 =", seed=i, max_tokens=8)
        assert answer.choices[0].text == expected.outputs[0].text


@pytest.mark.slow
def test_a_client_that_goes_away_leaves_nothing(client, llm):
    stream = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="demo", prompt=PROMPT, max_tokens=1500, extra_body={"ignore_eos": True}
        )

    async def until_empty():
        async with asyncio.timeout(20):
            while llm.stats().num_running or llm.stats().num_blocks_used:
                await asyncio.sleep(0.01)

    asyncio.run(until_empty())


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        (dict(temperature=3.0), "temperature", "in [0, 2], got 3.0"),
        (dict(top_p="much"), "top_p", "valid number"),
        (dict(n=0), "n", "greater than or equal to 1"),
        (dict(n=1000), "n", "the limit is 128"),
        (dict(stop=["x"] * 10_000), "stop", "has 10000 strings, the limit is 256"),
        (dict(prompt="a" * 10**6), "input_text", "1000000 characters"),
        (
            dict(prompt=[5] * 3000),
            "input_tokens",
            "This model's maximum context length is 2048 tokens. However, your prompt contains 3000 input tokens",
        ),
        (dict(prompt=[10**6]), None, "vocabulary"),
        (dict(prompt=None), "prompt", "is missing"),
        (dict(logprobs=21), "logprobs", "max_logprobs=20"),
        (dict(logit_bias={"x": 1}), "logit_bias", "no token ids"),
        (dict(stream_options={"include_usage": True}), "stream_options", "stream=true"),
        (dict(max_tokens=0), "max_tokens", "at least 1"),
        (dict(max_tokens=2049), "max_tokens", "2049 cannot be greater than max_model_len=2048"),
        (dict(seed=2**63), "seed", "less than or equal to 9223372036854775807"),
        (dict(suffix="x"), "suffix", "not supported"),
        (dict(extra_body={"use_beam_search": True}), "use_beam_search", "LLM.beam_search"),
        (dict(extra_body={"structured_outputs": {"regex": "("}}), None, "regex"),
        (dict(extra_body={"structured_outputs": {"json": {"type": "x"}}}), None, "type"),
        (dict(extra_body={"prompt_embeds": "AAAA"}), "prompt_embeds", "never loaded"),
        (dict(extra_body={"prompt_logprobs": 1}, stream=True), "prompt_logprobs", "stream=true"),
        (
            dict(extra_body={"response_format": {"type": "structural_tag", **BAD_TAG}}),
            None,
            "begin must be a string, got 1",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_values_are_400_with_the_field_named(client, llm, change, param, message):
    num_steps = llm.stats().num_steps
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**({"model": "demo", "prompt": PROMPT} | change))
    body = caught.value.body
    assert message in body["message"] and body["code"] == 400
    assert body["type"] == "BadRequestError"
    if param is not None:
        assert body["param"] == param
    assert llm.stats().num_steps == num_steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(messages=[]), "at least 1 item"),
        (dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "only text"),
        (dict(messages=[{"content": "x"}]), '"role"'),
        (dict(tool_choice="required"), "needs tools"),
        (dict(tools=[]), "tools must not be empty"),
        (dict(max_tokens=2049), "max_tokens=2049 cannot be greater than max_model_len=2048"),
        (dict(max_completion_tokens=2049), "max_completion_tokens=2049 cannot be greater"),
        (dict(reasoning_effort="much"), "'none', 'minimal', 'low'"),
        (dict(seed=-(2**63) - 1), "greater than or equal to -9223372036854775808"),
        (dict(tool_choice="often", tools=TOOLS), "tool_choice must be"),
        (dict(top_logprobs=3), "logprobs=true"),
        (dict(extra_body={"chat_template": "{{ 1 }}"}), "--trust-request-chat-template"),
        (dict(extra_body={"chat_template_kwargs": {"tokenize": True}}), "tokenize"),
        (dict(response_format={"type": "xml"}), "response_format"),
        (dict(extra_body={"prompt_logprobs": 0}, stream=True), "with stream=true"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_chats_are_400(client, llm, change, message):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**({"model": "demo", "messages": MESSAGES} | change))
    assert message in caught.value.body["message"]
    assert not (llm.stats().num_running or llm.stats().num_waiting)


@pytest.mark.slow
def test_models_that_are_not_served_are_404(client):
    with pytest.raises(openai.NotFoundError, match="'gpt-x' is not served here; there is 'demo'"):
        client.completions.create(model="gpt-x", prompt=PROMPT)
    assert [m.id for m in client.models.list()] == ["demo", "other-name"]
    assert client.models.retrieve("demo").max_model_len == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-x")
    with pytest.raises(openai.APIStatusError, match="generates text") as caught:
        client.embeddings.create(model="demo", input="x")
    assert caught.value.status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize("path", POOLING_PATHS)
def test_a_model_that_generates_refuses_to_pool(url, path):
    status, _, text = ask(url, path, {"input": "x"})
    assert status == 400 and f"{path} is for models that embed" in error_of(text)["message"]


@pytest.mark.slow
def test_unknown_fields_are_accepted_and_named_in_the_log(client, caplog):
    fields = {"colour": "red", "a\nb": 1} | {f"z{i:02}": i for i in range(20)}
    client.completions.create(model="demo", prompt=PROMPT, max_tokens=1, extra_body=fields)
    (line,) = [r.getMessage() for r in caplog.records if "without effect" in r.getMessage()]
    assert line.startswith(r"fields without effect in a CompletionRequest: 'a\nb', colour, z00")
    assert line.endswith("z07 and 12 more")


@pytest.mark.slow
def test_chat_templates_of_trusted_requests_run_sandboxed(llm):
    with serving(llm, trust_request_chat_template=True) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"

        def ask(template):
            return client.chat.completions.create(
                model="checkpoint",
                messages=MESSAGES,
                max_tokens=1,
                extra_body={"chat_template": template, "return_token_ids": True},
            )

        ids = llm.get_tokenizer()(MESSAGES[0]["content"])["input_ids"]
        assert ask(template).prompt_token_ids == ids
        with pytest.raises(openai.BadRequestError, match="unsafe|cannot render"):
            ask("{{ ''.__class__.__mro__[1].__subclasses__() }}")
        client.close()
