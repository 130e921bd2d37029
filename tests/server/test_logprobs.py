"""Logprobs in answers, and the requests for them. No engine."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from jaxpage.outputs import Logprob
from jaxpage.server.logprobs import chat_logprobs, generate_logprobs
from jaxpage.server.protocol.chat import ChatRequest
from jaxpage.server.protocol.completions import CompletionRequest

# The sampled token first, then others by rank.
ENTRIES = {
    7: Logprob(-2.0, 3, "é"),
    4: Logprob(-0.5, 1, "a"),
    5: Logprob(float("-inf"), 2, "b"),
}


def test_ids_instead_of_texts_keep_the_bytes_of_the_texts():
    for as_ids, token in ((True, "token_id:7"), (False, "é")):
        (content,) = chat_logprobs([7], [ENTRIES], 1, as_ids=as_ids)["content"]
        assert content["token"] == token and content["bytes"] == [0xC3, 0xA9]
        assert content["top_logprobs"][0]["bytes"] == [97]
    nameless = {7: Logprob(-2.0, 1, None)}
    (content,) = chat_logprobs([7], [nameless], 0, as_ids=False)["content"]
    assert content == {"token": "token_id:7", "logprob": -2.0, "bytes": None, "top_logprobs": []}


@pytest.mark.parametrize(("num_best", "ids"), [(0, [7]), (1, [7]), (2, [7, 4]), (-1, [7, 4, 5])])
def test_ids_in_ids_out_has_ids_logprobs_and_ranks(num_best, ids):
    (content,) = generate_logprobs([7], [ENTRIES], num_best)["content"]
    top = content.pop("top_logprobs")
    assert content == {"token_id": 7, "logprob": -2.0, "rank": 3}
    assert [each["token_id"] for each in top] == ids
    assert top[-1]["rank"] == ENTRIES[ids[-1]].rank and top[-1]["logprob"] >= -9999.0


def test_logprobs_of_given_ids():
    messages = [{"role": "user", "content": "x"}]
    chat = ChatRequest(messages=messages, logprobs=True, top_logprobs=2, logprob_token_ids=[4, 5])
    completion = CompletionRequest(prompt="x", logprobs=1, logprob_token_ids=[4, 5])
    for body in (chat, completion):
        params = body.params({})
        assert params.logprob_token_ids == [4, 5] and params.logprobs is None
    for body in (
        ChatRequest(messages=messages, logprob_token_ids=[4]),
        ChatRequest(messages=messages, logprobs=False, logprob_token_ids=[4]),
        CompletionRequest(prompt="x", logprob_token_ids=[4]),
    ):
        with pytest.raises(ValueError, match="logprob_token_ids needs logprobs"):
            body.params({})
    scored = CompletionRequest(
        prompt="x", logprobs=0, logprob_token_ids=[4], echo=True, max_tokens=0
    )
    with pytest.raises(ValueError, match="logprob_token_ids are those of sampled tokens"):
        scored.params({})
    assert ChatRequest(messages=messages, logprob_token_ids=[]).params({}).logprobs is None
    for body in (
        ChatRequest(messages=messages, logprobs=True, top_logprobs=2, logprob_token_ids=[]),
        CompletionRequest(prompt="x", logprobs=2, logprob_token_ids=[]),
    ):
        params = body.params({})
        assert params.logprob_token_ids is None and params.logprobs == 2
    with pytest.raises(ValidationError):
        CompletionRequest(prompt="x", logprobs=1, logprob_token_ids=["x"])
