"""The fields of streamed chunks, which are vLLM's: clients read some as attributes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import serving
from tests.server.test_operation import ask

CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}
TEXTS = {"prompt": ["Once upon a time", "3 + 4 ="]}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
HEAD = {"id", "object", "created", "model", "choices"}


def chunks_of(url: str, asked: dict[str, Any], **more: Any) -> Iterator[dict[str, Any]]:
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    body = {**asked, "stream": True, "max_tokens": 4, "ignore_eos": True, "seed": 1, **more}
    status, _, text = ask(url, path, body)
    assert status == 200, text
    for line in text.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def test_chunks_of_texts_have_vllm_s_fields(url):
    fields = {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    for chunk in chunks_of(url, TEXTS):
        assert chunk.keys() == HEAD
        (choice,) = chunk["choices"]
        assert choice.keys() == fields | {"token_ids", "prompt_token_ids"}
        assert choice["token_ids"] is None and choice["prompt_token_ids"] is None


def test_chunks_of_chats_have_vllm_s_fields(url):
    first, second, *rest = chunks_of(url, CHAT, n=2)
    fields = {"index", "delta", "logprobs", "finish_reason"}
    for chunk in (first, second):
        assert chunk.keys() == HEAD | {"prompt_token_ids", "prompt_text"}
        assert chunk["prompt_token_ids"] is None and chunk["prompt_text"] is None
        assert chunk["choices"][0].keys() == fields
    for chunk in rest:
        assert chunk.keys() == HEAD
        (choice,) = chunk["choices"]
        is_last = choice["finish_reason"] is not None
        assert choice.keys() == fields | {"token_ids"} | ({"stop_reason"} if is_last else set())
        assert choice["token_ids"] is None


def test_each_choice_of_a_chat_gets_the_prompt_s_ids(url):
    first, second, *rest = chunks_of(url, CHAT, n=2, return_token_ids=True)
    assert first["prompt_token_ids"] == second["prompt_token_ids"] != []
    assert all("prompt_token_ids" not in chunk for chunk in rest)


@pytest.mark.parametrize("asked", [TEXTS, CHAT], ids=["texts", "chat"])
def test_continuous_usage_is_that_of_the_chunk_s_choice(url, asked):
    *chunks, last = chunks_of(url, asked, n=2, stream_options=CONTINUOUS, return_token_ids=True)
    sent: dict[int, int] = {}
    prompts: dict[int, int] = {}
    for chunk in chunks:
        (choice,), usage = chunk["choices"], chunk["usage"]
        index = choice["index"]
        sent[index] = sent.get(index, 0) + len(choice.get("token_ids") or ())
        prompts[index] = usage["prompt_tokens"]
        assert usage["completion_tokens"] == sent[index]
        assert usage["total_tokens"] == usage["prompt_tokens"] + sent[index]
    num_prompts = len(sent) // 2
    assert set(sent.values()) == {4} and num_prompts == len(asked.get("prompt", [""]))
    assert last["usage"]["completion_tokens"] == 8 * num_prompts
    assert last["usage"]["prompt_tokens"] == sum(prompts.values()) / 2


def test_forced_usage_is_continuous(llm):
    with serving(llm, enable_force_include_usage=True) as url:
        for asked in (TEXTS, CHAT):
            assert all(chunk["usage"]["total_tokens"] > 0 for chunk in chunks_of(url, asked))
