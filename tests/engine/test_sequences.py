"""How a sequence ends, and what is kept of its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage.engine.sequences import append_tokens, new_sequence
from jaxpage.outputs import Logprob
from jaxpage.plan import StepResult
from jaxpage.request import FinishReason
from tests.fakes import FakeDetokenizer, make_request

EOS = 4  # the letter e


def answer(tokens: list[int], *, max_model_len: int = 100, **options):
    """A sequence to which a row of a result was appended: (sequence, tokens it took)."""
    request = make_request("a", [0, 0], **({"max_tokens": 10, "eos": (EOS,)} | options))
    sequence = new_sequence(request, 0, max_model_len, FakeDetokenizer(request))
    steps = np.arange(len(tokens))
    result = StepResult(
        token_ids=np.asarray(tokens, np.int32)[:, None],
        num_sampled=np.asarray([len(tokens)], np.int32),
        logprobs=-0.5 * np.ones((len(tokens), 1), np.float32),
        ranks=np.full((len(tokens), 1), 2, np.int32),
        top_token_ids=np.stack([steps + 20, np.asarray(tokens), steps + 40], -1)[:, None],
        top_logprobs=np.broadcast_to(np.float32([-0.25, -0.5, -1]), (len(tokens), 1, 3)),
    )
    taken = append_tokens(sequence, tokens, result, 0)
    return sequence, taken


@pytest.mark.parametrize(
    ("tokens", "options", "taken", "finish_reason", "stop_reason"),
    [
        ([1, 2, 3], {}, 3, None, None),
        ([1, EOS, 3], {}, 2, FinishReason.STOP, None),
        ([1, EOS, 3], {"ignore_eos": True}, 3, None, None),
        ([1, EOS, 3], {"ignore_eos": True, "stop_token_ids": [EOS]}, 2, FinishReason.STOP, EOS),
        ([1, EOS, 3], {"stop_token_ids": [EOS]}, 2, FinishReason.STOP, None),
        ([1, 2, 3], {"stop_token_ids": [2]}, 2, FinishReason.STOP, 2),
        ([1, 2, 3], {"max_tokens": 2}, 2, FinishReason.LENGTH, None),
        ([1, 2, 3], {"max_model_len": 4}, 2, FinishReason.LENGTH, None),
        ([1, 2, 3], {"max_model_len": 4, "max_tokens": None}, 2, FinishReason.LENGTH, None),
        ([1, EOS, 3], {"max_tokens": 2}, 2, FinishReason.STOP, None),
        ([1, 2, 3], {"stop": ["bc"]}, 2, FinishReason.STOP, "bc"),
        ([1, 2, 3], {"stop": ["bc"], "max_tokens": 2}, 2, FinishReason.STOP, "bc"),
        ([1, 2, 3, 2], {"stop": ["c"], "min_tokens": 2}, 4, FinishReason.STOP, "c"),
        ([1, 2, 3], {"stop": ["c"], "min_tokens": 1}, 2, FinishReason.STOP, "c"),
        ([1, EOS, 3], {"stop": ["e"]}, 2, FinishReason.STOP, None),
    ],
)
def test_sequence_ends_in_vllm_s_order_of_checks(
    tokens, options, taken, finish_reason, stop_reason
):
    sequence, num_taken = answer(tokens, **options)
    assert num_taken == taken
    assert sequence.output_token_ids == tokens[:taken]
    assert (sequence.finish_reason, sequence.stop_reason) == (finish_reason, stop_reason)


def test_logprobs_hold_the_best_ids_and_the_sampled_one():
    sequence, _ = answer([1, EOS, 3], logprobs=1)
    first = {1: Logprob(-0.5, 2), 20: Logprob(-0.25, 1)}
    assert sequence.logprobs == [first, {EOS: Logprob(-0.5, 2), 21: Logprob(-0.25, 1)}]
    assert sequence.cumulative_logprob == -1.0


@pytest.mark.parametrize(
    ("logprobs", "ids"), [(0, [1]), (2, [1, 20]), (3, [1, 20, 40]), (-1, [1, 20, 40])]
)
def test_logprobs_are_as_many_as_asked_for(logprobs, ids):
    sequence, _ = answer([1], logprobs=logprobs)
    assert list(sequence.logprobs[0]) == ids


def test_no_logprobs_are_kept_unasked():
    sequence, _ = answer([1])
    assert sequence.logprobs is None and sequence.cumulative_logprob == 0
