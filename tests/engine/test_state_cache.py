"""The prefix cache of models with a recurrent state: where states are kept, and hits only where one is."""

from __future__ import annotations

import pytest

from jaxpage.engine.state_cache import LEAST_TOKENS, FoundState, StateCache
from tests.engine.harness import assert_expected, make_engine, run
from tests.fakes import make_request

PROMPT = [i % 7 for i in range(43)]


def always(num_blocks: int) -> bool:
    return True


def rows_of(engine, request) -> list[tuple[int, int]]:
    """(start, number of tokens) of each row that computed tokens of its prompt."""
    prompt_len = len(request.prompt_token_ids)
    return [
        (start, number)
        for step in engine.steps
        for sequence, start, number in zip(
            step.sequences, step.plan.starts, step.plan.num_tokens, strict=True
        )
        if sequence.request is request and start < prompt_len
    ]


def answer(engine, request_id: str, prompt: list[int], **options):
    request = make_request(request_id, prompt, max_tokens=3, ignore_eos=True, **options)
    run(engine, request)
    assert_expected(engine, request)
    return request


def test_a_repeated_prompt_begins_at_the_last_border_before_its_last_token():
    engine = make_engine(num_cached_states=2)
    first = answer(engine, "first", PROMPT)
    assert rows_of(engine, first) == [(0, 40), (40, 3)]
    second = answer(engine, "second", PROMPT)
    assert rows_of(engine, second) == [(40, 3)] and second.num_cached_tokens == 40
    longer = answer(engine, "longer", PROMPT + [1, 2, 3, 4, 5, 6])
    assert rows_of(engine, longer) == [(40, 8), (48, 1)] and longer.num_cached_tokens == 40


def test_of_a_prompt_of_whole_blocks_the_last_one_is_computed():
    engine = make_engine(num_cached_states=2)
    assert rows_of(engine, answer(engine, "first", PROMPT[:40])) == [(0, 36), (36, 4)]
    assert rows_of(engine, answer(engine, "second", PROMPT[:40])) == [(36, 4)]


def test_a_common_beginning_is_found_by_the_third_prompt():
    """The second finds its KV without a state, and leaves one."""
    engine = make_engine(num_cached_states=4)
    answer(engine, "first", PROMPT)
    second = answer(engine, "second", [*PROMPT[:22], *[5] * 15])
    assert rows_of(engine, second) == [(0, 20), (20, 16), (36, 1)] and not second.num_cached_tokens
    third = answer(engine, "third", [*PROMPT[:22], *[6] * 15])
    assert rows_of(engine, third) == [(20, 16), (36, 1)] and third.num_cached_tokens == 20


def test_a_conversation_continues_after_its_last_prompt():
    engine = make_engine(num_cached_states=4)
    first = answer(engine, "first", PROMPT[:30])
    (sequence,) = first.sequences
    second = answer(engine, "second", [*sequence.token_ids, 1, 2, 3, 4])
    assert rows_of(engine, second)[0][0] == second.num_cached_tokens == 28


def test_no_state_is_kept_for_few_tokens():
    engine = make_engine(num_cached_states=4, least_tokens=16)
    short = answer(engine, "short", PROMPT[:16])
    assert rows_of(engine, short) == [(0, 16)]
    prompt = PROMPT[::-1]
    assert rows_of(engine, answer(engine, "long", prompt[:30])) == [(0, 28), (28, 2)]
    # The state after 40 tokens would save 12.
    assert rows_of(engine, answer(engine, "longer", prompt)) == [(28, 15)]


def test_borders_in_chunks():
    engine = make_engine(num_cached_states=4, max_num_batched_tokens=7)
    first = answer(engine, "first", PROMPT)
    assert rows_of(engine, first) == [*((7 * i, 7) for i in range(5)), (35, 5), (40, 3)]


def test_the_least_recently_used_state_is_replaced():
    engine = make_engine(num_cached_states=2)
    prompts = {name: [number] * 10 for number, name in enumerate("abc")}
    for name in "abacab":
        answer(engine, f"{name} {len(engine.steps)}", prompts[name])
    found = {name: answer(engine, name, prompts[name]).num_cached_tokens for name in "bac"}
    assert found == {"b": 8, "a": 8, "c": 0}


def test_equal_prompts_of_one_step_keep_one_state():
    engine = make_engine(num_cached_states=4)
    requests = [make_request(str(i), PROMPT, max_tokens=2, seed=i) for i in range(3)]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert sum(len(step.plan.state_saves) for step in engine.steps) == 1


def test_preempted_sequences_begin_with_a_state():
    engine = make_engine(num_blocks=24, num_cached_states=4)
    requests = [
        make_request(str(i), [i] * 30, max_tokens=20, ignore_eos=True, seed=i) for i in range(2)
    ]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert engine.stats().num_preemptions > 0
    begun = [a.state_slot for step in engine.steps for a in step.plan.admissions]
    assert not any(begun[:2]) and all(begun[2:])


def test_states_of_old_weights_are_not_found():
    engine = make_engine(num_cached_states=4)
    answer(engine, "first", PROMPT)
    engine.scheduler.begin_weight_epoch()
    assert answer(engine, "second", PROMPT).num_cached_tokens == 0
    assert answer(engine, "third", PROMPT).num_cached_tokens == 40


def test_a_reset_of_the_prefix_cache_forgets_states():
    """Their hashes are those of keys and values that are computed afterwards, perhaps with other weights."""
    engine = make_engine(num_cached_states=4)
    answer(engine, "first", PROMPT)
    assert engine.reset_prefix_cache()
    second = answer(engine, "second", PROMPT)
    assert rows_of(engine, second) == [(0, 40), (40, 3)]
    assert sum(len(step.plan.state_saves) for step in engine.steps) == 2


def test_no_state_is_trusted_after_a_failed_step():
    engine = make_engine(num_cached_states=4, fail_collect=(1,))
    with pytest.raises(RuntimeError, match="as told"):
        answer(engine, "first", PROMPT)
    assert answer(engine, "second", PROMPT).num_cached_tokens == 0


def test_a_state_can_be_found_by_the_next_plan_only():
    states = StateCache(range(5, 7), block_size=4, least_tokens=1)
    hashes = [b"a", b"b", b"c"]
    assert states.find(hashes, 0, always) == FoundState(0, 0, (3,))
    slot = states.save(b"b")
    assert slot in (5, 6) and states.save(b"b") == 0
    assert states.find(hashes, 2, always) == FoundState(0, 0, (2, 3))
    states.begin_plan()
    assert states.find(hashes, 3, always) == FoundState(2, slot, (3,))
    assert states.find(hashes, 1, always) == FoundState(0, 0, (1, 3))  # its KV is not cached


def test_a_plan_replaces_none_of_its_own_states():
    states = StateCache(range(5, 7), block_size=4)
    assert {states.save(b"a"), states.save(b"b")} == {5, 6}
    assert states.save(b"c") == 0
    states.begin_plan()
    assert states.save(b"c") in (5, 6)
    assert states.find([b"a"], 1, always).num_blocks == 0
    assert states.find([b"b"], 1, always).num_blocks == 1


def test_a_state_whose_blocks_are_computed_again_is_in_use_again():
    states = StateCache(range(5, 7), block_size=4)
    assert {states.save(b"a"), states.save(b"b")} == {5, 6}
    states.begin_plan()
    assert states.save(b"a") == 0
    assert states.save(b"c") in (5, 6)
    assert states.find([b"a"], 1, always).num_blocks == 1
    assert states.find([b"b"], 1, always).num_blocks == 0


def test_by_default_a_state_saves_many_tokens():
    states = StateCache(range(5, 7), block_size=16)
    least = LEAST_TOKENS // 16
    assert states.find([b"%d" % i for i in range(least - 1)], 0, always).borders == ()
    assert states.find([b"%d" % i for i in range(least)], 0, always).borders == (least,)
