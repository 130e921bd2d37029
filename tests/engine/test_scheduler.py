"""What a step computes, and who is preempted: the scheduler's plans, seen through a running engine."""

from __future__ import annotations

import pytest

from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduler import Scheduler
from jaxpage.request import Sequence
from tests.engine.harness import assert_consistent, assert_expected, finish, make_engine, run
from tests.fakes import make_request


def rows(step) -> list[tuple[str, int, int, bool]]:
    """(request id, first token, number of tokens, samples) of each row."""
    ids, plan = [s.request.request_id for s in step.sequences], step.plan
    return list(zip(ids, plan.starts, plan.num_tokens, plan.samples, strict=True))


def steps(engine, count: int) -> list[list[tuple]]:
    first = len(engine.steps)
    for _ in range(count):
        engine.step()
        assert_consistent(engine)
    return [rows(step) for step in engine.steps[first:]]


def sequence_of(request) -> Sequence:
    return request.sequences[0]


def test_one_token_budget_serves_running_sequences_first():
    engine = make_engine(max_num_batched_tokens=10)
    engine.add(make_request("a", [1] * 4, max_tokens=5))
    engine.add(make_request("b", [2] * 12, max_tokens=5))
    assert steps(engine, 3) == [
        [("a", 0, 4, True), ("b", 0, 6, False)],
        [("a", 4, 1, True), ("b", 6, 6, True)],
        [("a", 5, 1, True), ("b", 12, 1, True)],
    ]


def test_prompt_is_admitted_only_if_it_fits_as_a_whole():
    engine = make_engine(num_blocks=8, max_num_batched_tokens=8, block_size=4)
    engine.add(make_request("a", [1] * 15, max_tokens=2))
    engine.add(make_request("b", [2] * 16, max_tokens=2))
    assert [len(plan) for plan in steps(engine, 2)] == [1, 1]
    finish(engine)
    assert engine.stats().num_preemptions == 0


def test_request_slots_bound_the_rows():
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(make_request(name, [1], max_tokens=2))
    assert [len(plan) for plan in steps(engine, 3)] == [2, 2, 1]


def test_last_running_sequence_gives_way_and_resumes_with_its_tokens():
    # Five blocks of 4: two prompts of 7 tokens take four; the first to need a third block finds
    # one, the second is preempted.
    engine = make_engine(num_blocks=6, block_size=4, enable_prefix_caching=False)
    a = make_request("a", [1] * 7, max_tokens=9)
    b = make_request("b", [2] * 7, max_tokens=9)
    engine.add(a)
    engine.add(b)
    plans = steps(engine, 3)
    assert plans[2] == [("a", 8, 1, True)]
    assert engine.scheduler.waiting == [sequence_of(b)]
    assert sequence_of(b).num_output_tokens == 2 and b.num_preemptions == 1
    finish(engine)
    assert engine.stats().num_preemptions == 1
    assert_expected(engine, a, b)
    resumed = [row for step in engine.steps[3:] for row in rows(step) if row[0] == "b"]
    assert resumed[0] == ("b", 0, 9, True)


def test_step_that_preempted_admits_nobody():
    engine = make_engine(num_blocks=6, block_size=4, max_num_seqs=2, policy="priority")
    engine.add(make_request("a", [1] * 7, max_tokens=9, priority=0))
    engine.add(make_request("b", [2] * 7, max_tokens=9, priority=2))
    steps(engine, 1)
    engine.add(make_request("c", [3], max_tokens=1, priority=1))
    # In the third step b is preempted, which leaves a slot and two blocks: enough for c, a step later.
    assert steps(engine, 3)[1:] == [[("a", 8, 1, True)], [("a", 9, 1, True), ("c", 0, 1, True)]]


def test_preempted_sequence_finds_its_blocks_in_the_cache():
    engine = make_engine(num_blocks=7, block_size=4)
    a = make_request("a", [1] * 8, max_tokens=6)
    b = make_request("b", [2] * 11, max_tokens=6)
    run(engine, a, b)
    assert engine.stats().num_preemptions == 1
    later = [row for step in engine.steps[1:] for row in rows(step) if row[0] == "b"]
    assert [row for row in later if row[2] > 1] == [("b", 8, 5, True)]
    assert b.num_cached_tokens == 0, "recorded when first scheduled, not when resumed"
    assert_expected(engine, a, b)


def test_priority_policy_serves_lower_values_first_and_preempts_higher_ones():
    engine = make_engine(num_blocks=6, block_size=4, policy="priority")
    late = make_request("late", [1] * 7, max_tokens=9, priority=5)
    soon = make_request("soon", [2] * 7, max_tokens=9, priority=-1)
    engine.add(late)
    engine.add(soon)
    plans = steps(engine, 3)
    assert [row[0] for row in plans[0]] == ["soon", "late"]
    assert plans[2] == [("soon", 8, 1, True)] and late.num_preemptions == 1


def test_fcfs_policy_ignores_priority():
    engine = make_engine()
    engine.add(make_request("a", [1], priority=5))
    engine.add(make_request("b", [1], priority=-5))
    assert [row[0] for row in steps(engine, 1)[0]] == ["a", "b"]


def test_equal_prompts_of_one_step_share_their_prefix():
    engine = make_engine(block_size=4)
    prompt = list(range(10))
    requests = [make_request(name, prompt, max_tokens=2, seed=i) for i, name in enumerate("ab")]
    for request in requests:
        engine.add(request)
    assert steps(engine, 1) == [[("a", 0, 10, True), ("b", 8, 2, True)]]
    assert (
        sequence_of(requests[0]).block_tables[0][:2] == sequence_of(requests[1]).block_tables[0][:2]
    )
    finish(engine)
    assert_expected(engine, *requests)


def test_last_block_of_a_fully_cached_prompt_is_computed_again():
    engine = make_engine(block_size=4)
    prompt = list(range(12))
    run(engine, make_request("a", prompt, max_tokens=1))
    again = make_request("b", prompt, max_tokens=1)
    run(engine, again)
    assert again.num_cached_tokens == 8
    assert rows(engine.steps[-1]) == [("b", 8, 4, True)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_answer_is_cached_for_the_next_turn(overlap, decode_steps):
    """All KV that was computed is found: every token's but the last one's."""
    engine = make_engine(block_size=4, overlap=overlap, decode_steps=decode_steps)
    first = make_request("a", [1, 2, 3, 4, 5, 6], max_tokens=11)
    run(engine, first)
    second = make_request("b", [*sequence_of(first).token_ids, 9], max_tokens=2)
    run(engine, second)
    assert second.num_cached_tokens == 16
    assert_expected(engine, first, second)


@pytest.mark.parametrize(
    "options", [{"salt": "other"}, {"salt": None}, {"salt": "s", "skip_reading_prefix_cache": True}]
)
def test_cache_is_not_read_across_salts_or_against_the_request_s_will(options):
    engine = make_engine(block_size=4)
    prompt = list(range(12))
    run(engine, make_request("a", prompt, salt="s"))
    other = make_request("b", prompt, **options)
    run(engine, other)
    assert other.num_cached_tokens == 0
    same = make_request("c", prompt, salt="s")
    run(engine, same)
    assert same.num_cached_tokens == 8


def test_only_the_computed_part_of_an_aborted_prompt_is_cached():
    engine = make_engine(block_size=4, max_num_batched_tokens=10)
    prompt = list(range(30))
    engine.add(make_request("a", prompt))
    steps(engine, 1)
    engine.abort("a")
    again = make_request("b", prompt)
    run(engine, again)
    assert again.num_cached_tokens == 8
    assert_expected(engine, again)


def test_blocks_of_old_weights_are_never_found():
    engine = make_engine(block_size=4, max_num_seqs=3)
    prompt = list(range(12))
    run(engine, make_request("before", prompt))
    engine.add(make_request("short", [7], max_tokens=20))  # no full block yet
    engine.add(make_request("chunk", prompt[:9], max_tokens=20))
    waits = [make_request(name, prompt) for name in ("third", "fourth")]
    for request in waits:
        engine.add(request)
    engine.step()  # third is admitted, fourth waits
    engine.scheduler.begin_weight_epoch()
    finish(engine)
    after = make_request("after", prompt)
    run(engine, after)
    assert waits[1].num_cached_tokens == 0
    assert after.num_cached_tokens == 8, "from fourth, computed with the new weights"


def test_sequence_that_straddles_a_weight_update_leaves_nothing_in_the_cache():
    engine = make_engine(block_size=4)
    request = make_request("a", [7], max_tokens=20)
    engine.add(request)
    engine.step()
    engine.scheduler.begin_weight_epoch()
    finish(engine)
    after = make_request("b", sequence_of(request).token_ids, max_tokens=2)
    run(engine, after)
    assert after.num_cached_tokens == 0


def test_sequences_of_a_request_share_the_prompt_computed_once():
    engine = make_engine(block_size=4)
    request = make_request("a", [1] * 10, n=3, max_tokens=4)
    engine.add(request)
    assert steps(engine, 1) == [[("a", 0, 10, True), ("a", 10, 0, True), ("a", 10, 0, True)]]
    assert len({tuple(s.block_tables[0]) for s in request.sequences}) == 1
    steps(engine, 1)
    # The first two writers to the shared partial block get copies, the last writes in place.
    shared = request.sequences[2].block_tables[0][2]
    assert engine.runner.plans[-1].block_copies == [
        (shared, s.block_tables[0][2]) for s in request.sequences[:2]
    ]
    assert len({s.block_tables[0][2] for s in request.sequences}) == 3
    assert len({tuple(s.block_tables[0][:2]) for s in request.sequences}) == 1
    finish(engine)
    assert engine.stats().num_block_copies == 2
    assert engine.runner.num_computed_tokens == 10 + 3 * 3
    assert_expected(engine, request)


def test_nothing_is_copied_if_the_prompt_fills_its_blocks():
    engine = make_engine(block_size=4)
    request = make_request("a", [1] * 8, n=3, max_tokens=4)
    run(engine, request)
    assert engine.stats().num_block_copies == 0
    assert_expected(engine, request)


def test_sequences_without_a_slot_are_served_later():
    engine = make_engine(block_size=4, max_num_seqs=2)
    request = make_request("a", [1] * 9, n=5, max_tokens=3)
    run(engine, request)
    assert_expected(engine, request)
    assert max(plan.num_rows for plan in engine.runner.plans) == 2


def test_decode_steps_are_taken_together_when_every_row_decodes():
    engine = make_engine(decode_steps=4)
    engine.add(make_request("a", [1] * 4, max_tokens=20))
    steps(engine, 2)
    engine.add(make_request("b", [2] * 4, max_tokens=20))
    steps(engine, 2)
    assert [plan.num_steps for plan in engine.runner.plans] == [1, 4, 1, 4]


def test_decode_steps_end_with_the_longest_row():
    engine = make_engine(decode_steps=8)
    a, b = make_request("a", [1], max_tokens=3), make_request("b", [2], max_tokens=6)
    run(engine, a, b)
    assert [plan.num_steps for plan in engine.runner.plans] == [1, 5]
    assert_expected(engine, a, b)


def test_decode_steps_are_halved_instead_of_preempting():
    engine = make_engine(num_blocks=4, block_size=4, decode_steps=8, enable_prefix_caching=False)
    a = make_request("a", [1] * 3, max_tokens=9)
    b = make_request("b", [2] * 3, max_tokens=9)
    run(engine, a, b)
    # Three blocks: 8 more tokens for both would need six, 4 or 2 need four, 1 needs two.
    assert engine.runner.plans[1].num_steps == 1
    assert_expected(engine, a, b)


def test_row_that_ends_within_a_launch_takes_no_block_beyond_its_end():
    # a ends at 5 tokens and needs KV of 4, one block; b's eight further tokens need two more.
    engine = make_engine(block_size=4, decode_steps=8)
    a, b = make_request("a", [1] * 3, max_tokens=2), make_request("b", [2], max_tokens=12)
    run(engine, a, b)
    assert [plan.num_steps for plan in engine.runner.plans[:2]] == [1, 8]
    assert [len(plan.table_updates) for plan in engine.runner.plans[:2]] == [0, 2]
    assert_expected(engine, a, b)


def test_blocks_are_allocated_only_up_to_max_len():
    # 3 blocks of 4 hold the KV of 12 tokens: exactly a sequence of 13, whose last needs none.
    engine = make_engine(block_size=4, decode_steps=16)
    request = make_request("a", [1] * 4, max_tokens=9)
    run(engine, request)
    assert [plan.num_steps for plan in engine.runner.plans] == [1, 8]
    assert [len(plan.table_updates) for plan in engine.runner.plans] == [0, 2]
    assert_expected(engine, request)


@pytest.mark.parametrize(("num_free", "num_steps"), [(17, 8), (16, 4), (2, 4)])
def test_of_sixteen_free_blocks_one_may_be_held_for_later_steps(num_free, num_steps):
    # 4 more tokens lie in the block that the first of them takes, 8 need one more.
    engine = make_engine(num_blocks=2 + num_free, block_size=4, decode_steps=8)
    request = make_request("a", [1] * 4, max_tokens=9)
    run(engine, request)
    assert engine.runner.plans[1].num_steps == num_steps
    assert_expected(engine, request)


@pytest.mark.parametrize(
    ("prompt_len", "options", "message"),
    [
        (0, {}, "empty prompt"),
        (20, {}, "prompt of 20 tokens leaves no room for an answer within max_model_len=20"),
        (16, {"max_tokens": 2}, "18 tokens in all, needs 5 blocks of 4, but the pool has 4"),
        (10, {"max_tokens": None}, "20 tokens in all, needs 5 blocks of 4, but the pool has 4"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_changes(prompt_len, options, message):
    engine = make_engine(num_blocks=5, block_size=4, max_model_len=20)
    request = make_request("a", [1] * prompt_len, **options)
    with pytest.raises(ValueError, match=message):
        engine.add(request)
    assert not engine.has_unfinished_requests() and not request.sequences
    fits = make_request("a", [1] * 16, max_tokens=1)
    run(engine, fits)
    assert_expected(engine, fits)


def test_request_id_in_use_is_refused():
    engine = make_engine()
    engine.add(make_request("a", [1]))
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add(make_request("a", [2]))
    finish(engine)
    run(engine, make_request("a", [3]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0,.* must be at least 1"),
        ({"decode_steps": 0}, "decode_steps=0 must be at least 1"),
        ({"max_model_len": 1}, "max_model_len=1 at least 2"),
        ({"policy": "random"}, "'fcfs' nor 'priority'"),
    ],
)
def test_impossible_limits_are_refused(options, message):
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
    with pytest.raises(ValueError, match=message):
        Scheduler(KVCache(4, 4, enable_prefix_caching=True), **(limits | options))


def test_plan_names_the_features_that_its_rows_need():
    engine = make_engine()
    engine.add(make_request("a", [1], features=1, max_tokens=1))
    engine.add(make_request("b", [1], features=4 | 64, max_tokens=3))
    engine.add(make_request("c", [1], max_tokens=2))
    steps(engine, 3)
    assert [plan.features for plan in engine.runner.plans] == [1 | 4 | 64, 4 | 64, 4 | 64]
