"""Prompt lookup, on token ids alone."""

from dataclasses import replace

import pytest

from jaxpage.engine.drafts import PromptLookup, may_have_drafts
from jaxpage.engine.kv_cache import SHARE_AHEAD
from jaxpage.engine.sequences import new_sequence
from jaxpage.engine.stats import total
from jaxpage.request import Request, Sequence
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
    assert not any(may_have_drafts(sequence.request) for sequence in (masked, whole, beam))
    assert may_have_drafts(sequence_of(tokens).request)


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_without_free_blocks_drafts_fill_the_last_block(has_draft_model):
    """Five blocks of eight tokens: one more is too large a share of what is free."""
    engine = make_engine(
        num_drafts=4, has_draft_model=has_draft_model, num_blocks=6, block_size=8, max_num_seqs=1
    )
    request = make_request("0", [1, 2, 3], seed=0, max_tokens=25)
    run(engine, request)
    assert_expected(engine, request)
    plans = [step.plan for step in engine.steps if step.plan.num_drafts]
    assert plans
    for plan in plans:
        last_known = plan.starts[0]
        assert (last_known + plan.num_drafts[0]) // 8 == last_known // 8


def same_requests(num: int, **options) -> list[Request]:
    return [make_request(str(i), [i, 1, 2], seed=i, **options) for i in range(num)]


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_right_drafts_save_steps_and_are_counted(has_draft_model):
    plain, engine = make_engine(), make_engine(num_drafts=4, has_draft_model=has_draft_model)
    run(plain, *same_requests(3, max_tokens=20))
    requests = same_requests(3, max_tokens=20)
    run(engine, *requests)
    assert_expected(engine, *requests)
    stats = engine.stats()
    assert stats.num_steps < plain.stats().num_steps
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens <= 4 * stats.num_drafts
    by_position = stats.accepted_per_position
    assert sum(by_position) == stats.num_accepted_tokens and len(by_position) == 4
    # A token is right only after all before it.
    assert list(by_position) == sorted(by_position, reverse=True)
    assert by_position[0] <= stats.num_drafts
    both = total([stats, replace(stats, accepted_per_position=(1,))])
    assert both.accepted_per_position == (by_position[0] + 1, *by_position[1:])
    assert stats.generation_tokens == plain.stats().generation_tokens
    # Nothing is computed twice but what stood in the place of a wrong draft.
    wrong = stats.num_draft_tokens - stats.num_accepted_tokens
    assert engine.runner.num_computed_tokens == plain.runner.num_computed_tokens + wrong


def test_drafts_get_only_the_budget_that_prompts_and_other_rows_leave():
    """So as many steps have prompts as without drafts, and no row waits for its turn."""
    plain, engine = (
        make_engine(max_num_batched_tokens=16, max_num_seqs=6, num_drafts=number)
        for number in (0, 8)
    )
    run(plain, *same_requests(20, max_tokens=20))
    requests = same_requests(20, max_tokens=20)
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert engine.stats().num_accepted_tokens > 50
    assert engine.stats().num_steps < plain.stats().num_steps
    assert max(step.plan.total_tokens for step in engine.steps) == 16


@pytest.mark.parametrize("windows", [(None,), (30, None), (30, 30, None)])
def test_no_sequence_is_preempted_for_a_guess(windows):
    """Drafts take few of the free blocks, once all other rows of a step have theirs."""
    num_preemptions = num_drafts_with_blocks = 0
    for num_blocks in range(15 * len(windows), 60 * len(windows), 3):
        engine = make_engine(
            num_drafts=6, num_blocks=num_blocks, block_size=2, windows=windows, max_num_seqs=6
        )
        pool = engine.scheduler.kv.pool
        make_room, lengthen = engine.scheduler._make_room, engine.scheduler.kv.lengthen
        taken: list[int] = []

        def watched(step, sequence, end, make_room=make_room):
            assert not step.plan.drafts
            return make_room(step, sequence, end)

        def counted(*args, lengthen=lengthen, pool=pool, taken=taken):
            before = pool.num_free
            found = lengthen(*args)
            assert SHARE_AHEAD * (before - pool.num_free) <= before
            taken.append(before - pool.num_free)
            return found

        engine.scheduler._make_room, engine.scheduler.kv.lengthen = watched, counted
        requests = same_requests(6, max_tokens=25)
        run(engine, *requests)
        assert_expected(engine, *requests)
        num_preemptions += engine.stats().num_preemptions
        num_drafts_with_blocks += sum(map(bool, taken))
    assert num_preemptions > 20 and num_drafts_with_blocks > 10
