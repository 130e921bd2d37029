"""How a sequence ends: by its ids and its length in the engine, and then by its text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.completions import GrowingCompletion
from jaxpage.engine.sequences import append_tokens, new_sequence
from jaxpage.engine.step_output import SequenceEnd
from jaxpage.request import FinishReason
from jaxpage.sampling_params import RepetitionDetectionParams
from tests.fakes import FakeDetokenizer, ends_with_a_repetition, make_request

EOS = 4  # the letter e
TRIPLES = {"max_pattern_size": 2, "min_count": 3}
REPEATED = "repetition", "repetition_detected"


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(2, 4),
    st.integers(0, 8),
)
def test_repetition_ends_a_sequence_as_soon_as_it_is_there(output, least, more, count, min_tokens):
    params = RepetitionDetectionParams(least + more, least, count)
    request = make_request(
        "a", [0, 0], max_tokens=100, repetition_detection=params, min_tokens=min_tokens
    )
    sequence = new_sequence(request, 0, 1000)
    kept = append_tokens(sequence, output)
    for end in range(max(1, min_tokens), len(kept)):
        assert not ends_with_a_repetition(output[:end], params)
    ended = len(kept) >= min_tokens and ends_with_a_repetition(kept, params)
    assert (sequence.finish_reason is FinishReason.REPETITION) == ended
    assert ended or kept == output


def answer(tokens: list[int], *, max_model_len: int = 100, **options):
    """What became of a sequence to which a row's tokens were appended: (completion, tokens it took)."""
    request = make_request("a", [0, 0], **({"max_tokens": 10, "eos": (EOS,)} | options))
    sequence = new_sequence(request, 0, max_model_len)
    kept = append_tokens(sequence, tokens)
    assert sequence.output_token_ids == kept == tokens[: len(kept)]
    end = None
    if sequence.finish_reason is not None:
        end = SequenceEnd(sequence.finish_reason, sequence.stop_reason)
    completion = GrowingCompletion(0, FakeDetokenizer(request), None, request.params.min_tokens)
    return completion, completion.append(kept, end)


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
        ([1, 2, 2, 2, 2], {"repetition_detection": TRIPLES}, 4, *REPEATED),
        ([2, 2, 2], {"repetition_detection": TRIPLES, "max_tokens": 3}, 3, "length", None),
        ([2, 2, 2, 2], {"repetition_detection": TRIPLES, "min_tokens": 4}, 4, *REPEATED),
        ([0, 2, 2], {"repetition_detection": TRIPLES}, 3, None, None),  # the prompt does not count
        ([1, 2, 1, 2, 1, 2, 1], {"repetition_detection": TRIPLES}, 6, *REPEATED),
        ([2, 2, 2, 2], {"repetition_detection": TRIPLES, "stop": ["cc"]}, 2, "stop", "cc"),
    ],
)
def test_sequence_ends_in_vllm_s_order_of_checks(
    tokens, options, taken, finish_reason, stop_reason
):
    completion, num_taken = answer(tokens, **options)
    assert num_taken == taken
    assert completion.token_ids == tokens[:taken]
    assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)
