"""Prompt lookup, on token ids alone."""

import pytest

from jaxpage.engine.drafts import PromptLookup
from jaxpage.engine.sequences import new_sequence
from jaxpage.request import Sequence
from jaxpage.speculation import SpeculativeConfig
from tests.engine.harness import assert_expected, make_engine, run
from tests.fakes import FakeMaskSource, make_beam_request, make_request


def sequence_of(tokens: list[int], **options) -> Sequence:
    return new_sequence(make_request("0", tokens, **options), 0, 1000)


def lookup(num_tokens: int = 3, shortest: int = 1, longest: int = 3) -> PromptLookup:
    return PromptLookup(
        SpeculativeConfig(
            num_speculative_tokens=num_tokens,
            prompt_lookup_min=shortest,
            prompt_lookup_max=longest,
        )
    )


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4], []),
        ([5], []),
        ([5, 5], [5]),
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        # the longest occurrence, not the latest
        ([1, 2, 7, 7, 7, 8, 2, 6, 6, 6, 1, 2], [7, 7, 7]),
        # the latest of equally long ones
        ([1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 1, 2], [8, 8, 8]),
        # the latest that is followed by enough tokens: of a text that repeats itself a whole period
        ([1, 2, 1, 2, 1, 2, 1, 2], [1, 2, 1]),
        # the first if none is
        ([4, 1, 2, 1, 2], [1, 2]),
    ],
)
def test_what_followed_the_last_tokens_before(tokens, expected):
    assert lookup().drafts(sequence_of(tokens), 10) == expected


def test_occurrences_are_as_long_as_told():
    tokens = [1, 2, 3, 9, 9, 9, 4, 2, 3]
    assert lookup(shortest=2).drafts(sequence_of(tokens), 10) == [9, 9, 9]
    assert lookup(shortest=3).drafts(sequence_of(tokens), 10) == []
    assert (
        lookup(longest=1).drafts(sequence_of([1, 2, 8, 8, 8, 3, 2, 7, 7, 7, 1, 2]), 10) == [7] * 3
    )


def test_no_more_than_there_is_room_for():
    tokens = [1, 2, 3, 4, 9, 1, 2]
    assert lookup().drafts(sequence_of(tokens), 2) == [3, 4]
    assert lookup().drafts(sequence_of(tokens), 0) == []
    assert lookup(num_tokens=1).drafts(sequence_of(tokens), 5) == [3]


def test_tokens_that_come_later_are_found():
    sequence, find = sequence_of([1, 2, 3]), lookup()
    assert find.drafts(sequence, 10) == []
    for token, expected in [(9, []), (1, [2, 3, 9]), (2, [3, 9, 1]), (5, []), (9, [1, 2, 5])]:
        sequence.token_ids.append(token)
        assert find.drafts(sequence, 10) == expected


def test_rows_that_need_the_host_for_each_token_have_no_drafts():
    tokens = [1, 2, 3, 4, 9, 1, 2]
    masked = sequence_of(tokens, mask_source=FakeMaskSource())
    whole = sequence_of(tokens)
    whole.request.wants_vocabulary = True
    beam = new_sequence(make_beam_request("0", tokens, width=2, max_tokens=5), 0, 1000)
    assert all(lookup().drafts(sequence, 10) == [] for sequence in (masked, whole, beam))


def test_right_drafts_save_steps_and_are_counted():
    requests = [make_request(str(i), [i, 1, 2], max_tokens=20, seed=i) for i in range(3)]
    plain = make_engine()
    run(plain, *requests)
    again = [make_request(str(i), [i, 1, 2], max_tokens=20, seed=i) for i in range(3)]
    engine = make_engine(num_drafts=4)
    run(engine, *again)
    assert_expected(engine, *again)
    stats = engine.stats()
    assert stats.num_steps < plain.stats().num_steps
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens <= 4 * stats.num_drafts
    assert stats.generation_tokens == plain.stats().generation_tokens


def test_no_sequence_is_preempted_for_a_guess():
    """Two blocks of four tokens for each of two sequences are all there are."""
    engine = make_engine(num_drafts=4, num_blocks=5, block_size=4, max_model_len=8)
    requests = [make_request(str(i), [i, 1], max_tokens=6) for i in range(2)]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert engine.stats().num_preemptions == 0
