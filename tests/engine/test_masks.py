"""Late sampling: sequences that wait for a mask hold nobody back, and sample what they would have sampled anyway."""

from __future__ import annotations

import pytest

from jaxpage.request import WaitingFor
from tests.engine.harness import (
    assert_consistent,
    assert_expected,
    assert_nothing_leaked,
    finish,
    make_engine,
    run,
)
from tests.fakes import FakeMaskSource, make_beam_request, make_request

UNTIL_WAITED_FOR = -1


def masked(name: str, prompt: list[int], *delays: int, **options):
    return make_request(name, prompt, mask_source=FakeMaskSource(len(name), delays), **options)


def rows(step) -> list[tuple[str, int, int, bool]]:
    """(request id, first token, number of tokens, samples) of each row."""
    ids, plan = [s.request.request_id for s in step.sequences], step.plan
    return list(zip(ids, plan.starts, plan.num_tokens, plan.samples, strict=True))


def test_a_mask_that_is_there_goes_up_with_its_row():
    engine = make_engine()
    request = masked("a", [1, 2, 3], 0, max_tokens=3)
    run(engine, request)
    assert_expected(engine, request)
    assert [rows(step) for step in engine.steps] == [
        [("a", 0, 3, True)],
        [("a", 3, 1, True)],
        [("a", 4, 1, True)],
    ]
    assert [list(plan.masks) for plan in engine.runner.plans] == [[0]] * 3


def test_a_row_whose_mask_is_late_is_computed_now_and_samples_later():
    engine = make_engine()
    slow = masked("slow", [1, 2, 3], 2, max_tokens=2)
    other = make_request("other", [4], max_tokens=6, ignore_eos=True)
    run(engine, slow, other)
    assert_expected(engine, slow, other)
    assert [rows(step) for step in engine.steps] == [
        [("slow", 0, 3, False), ("other", 0, 1, True)],
        [("other", 1, 1, True)],
        [("other", 2, 1, True), ("slow", 3, 0, True)],  # late rows come last
        [("slow", 3, 1, False), ("other", 3, 1, True)],
        [("other", 4, 1, True)],
        [("other", 5, 1, True), ("slow", 4, 0, True)],
    ]
    assert [plan.num_late_rows for plan in engine.runner.plans] == [0, 0, 1, 0, 0, 1]
    assert [list(plan.masks) for plan in engine.runner.plans] == [[], [], [1], [], [], [1]]


def test_tokens_in_flight_are_computed_before_their_mask_is_asked_for():
    """The overlapped loop does not know the last token when it plans its row: the forward pass does not wait for it."""
    engine = make_engine(overlap=True)
    request = masked("a", [1, 2, 3], 0, max_tokens=3)
    run(engine, request)
    assert_expected(engine, request)
    assert [rows(step) for step in engine.steps] == [
        [("a", 0, 3, True)],
        [("a", 3, 1, False)],
        [("a", 4, 0, True)],
        [("a", 4, 1, False)],
        [("a", 5, 0, True)],
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_others_are_not_held_back(overlap, decode_steps):
    """They take as many steps as without the slow ones beside them."""

    def num_steps(*companions) -> int:
        engine = make_engine(overlap=overlap, decode_steps=decode_steps)
        others = [make_request(str(i), [i, i], seed=i, max_tokens=21) for i in range(3)]
        for request in (*companions, *others):
            engine.add(request)
        count = 0
        while not all(request.finished for request in others):
            engine.step()
            assert_consistent(engine)
            count += 1
        finish(engine)
        assert_expected(engine, *companions, *others)
        return count

    slow = [masked(name, [1, 2], UNTIL_WAITED_FOR, max_tokens=2) for name in ("slow", "slower")]
    assert num_steps(*slow) == num_steps()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("delays", [(0,), (1,), (3, 0), (UNTIL_WAITED_FOR,), (0, UNTIL_WAITED_FOR)])
def test_tokens_are_those_of_the_plain_loop(overlap, decode_steps, delays):
    engine = make_engine(overlap=overlap, decode_steps=decode_steps, max_num_batched_tokens=7)
    requests = [
        masked(f"masked {i}", [1, 2, 3] * (1 + i), *delays, seed=i, max_tokens=9, eos=(3,))
        for i in range(4)
    ]
    requests += [make_request(str(i), [1, 2, 3] * 3, seed=i, max_tokens=15) for i in range(3)]
    run(engine, *requests)
    assert_expected(engine, *requests)


def test_several_decode_steps_go_on_beside_sequences_that_wait():
    engine = make_engine(decode_steps=4)
    slow = masked("slow", [1, 2], 3, max_tokens=2)
    other = make_request("other", [4], max_tokens=30, ignore_eos=True)
    run(engine, slow, other)
    assert_expected(engine, slow, other)
    plans = engine.runner.plans
    assert [plan.num_steps for plan in plans[:5]] == [1, 4, 4, 1, 1]
    assert all(plan.num_steps == 1 for plan in plans if plan.masks)


def test_an_engine_with_nothing_else_to_do_waits_instead_of_asking_again_and_again():
    for overlap in (False, True):
        engine = make_engine(overlap=overlap)
        request = masked("a", [1, 2], UNTIL_WAITED_FOR, max_tokens=5)
        run(engine, request)
        assert_expected(engine, request)
        assert request.mask_source.num_waits == 5
        # With the row or when its step was collected, before the wait, after it. The first mask is asked for in both.
        assert request.mask_source.num_calls == 5 * 3 + overlap


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_is_preempted_while_it_waits_computes_its_last_token_again(
    preemption_mode, overlap
):
    engine = make_engine(
        num_blocks=10,
        num_host_blocks=20,
        preemption_mode=preemption_mode,
        overlap=overlap,
        enable_prefix_caching=False,
    )
    other = make_request("other", [5] * 8, max_tokens=28, ignore_eos=True)
    slow = masked("slow", [6] * 11, 0, 6, max_tokens=16, ignore_eos=True)
    engine.add(other)
    engine.add(slow)
    (sequence,) = slow.sequences
    preempted_while_waiting = 0
    while engine.has_unfinished_requests():
        waited = sequence.waiting_for is WaitingFor.MASK
        engine.step()
        assert_consistent(engine)
        preempted_while_waiting += waited and not sequence.slot and not sequence.finished
    assert_nothing_leaked(engine)
    assert_expected(engine, other, slow)
    assert preempted_while_waiting > 0
    swaps = [p.transfers for p in engine.runner.plans if p.transfers is not None]
    assert bool(swaps) == (preemption_mode == "swap")


def test_all_kv_lost_while_one_waits():
    engine = make_engine()
    slow, other = masked("slow", [1, 2, 3], 4, max_tokens=3), make_request("b", [2], max_tokens=12)
    engine.add(slow)
    engine.add(other)
    for _ in range(2):
        engine.step()
    assert slow.sequences[0].waiting_for is WaitingFor.MASK
    engine.runner.forget_everything()
    engine.scheduler.preempt_all()
    finish(engine)
    assert_expected(engine, slow, other)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_waits_can_be_aborted(overlap):
    engine = make_engine(overlap=overlap)
    slow, other = masked("slow", [1, 2, 3], 9, max_tokens=3), make_request("b", [2], max_tokens=6)
    engine.add(slow)
    engine.add(other)
    for _ in range(3):
        engine.step()
    assert slow.sequences[0].waiting_for is WaitingFor.MASK
    engine.abort("slow")
    finish(engine)
    assert_expected(engine, other)
    assert slow.sequences[0].num_output_tokens == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("delays", [(0, 2), (2, 0), (1, 3), (UNTIL_WAITED_FOR, 0)])
def test_siblings_take_over_the_hidden_state_of_the_prompt(delays, overlap):
    """Some of them sample with its row, others wait: the prompt is computed once all the same."""
    engine = make_engine(overlap=overlap)
    request = masked("a", [1] * 10, *delays, n=3, max_tokens=4)
    run(engine, request)
    assert_expected(engine, request)
    prompt_rows = [row for step in engine.steps for row in rows(step) if row[1] < 10]
    assert sum(count for _, _, count, _ in prompt_rows) == 10


def test_a_masked_answer_is_cached_like_any_other():
    engine = make_engine(block_size=4)
    first = masked("a", [1, 2, 3, 4, 5, 6], 1, max_tokens=11)
    run(engine, first)
    second = masked("b", [*first.sequences[0].token_ids, 9], 0, 2, max_tokens=3)
    run(engine, second)
    assert second.num_cached_tokens == 16
    assert_expected(engine, first, second)


@pytest.mark.parametrize("kind", ["fail_launch", "fail_collect"])
@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_failed_step_the_others_end_as_expected(kind, number, overlap):
    engine = make_engine(overlap=overlap, **{kind: (number,)})
    requests = [masked("m" * i, [i] * 5, i, 0, max_tokens=6) for i in range(1, 4)]
    requests += [make_request(str(i), [i] * 5, max_tokens=2 + i) for i in range(3)]
    for request in requests:
        engine.add(request)
    failures = 0
    while engine.has_unfinished_requests():
        try:
            engine.step()
        except RuntimeError:
            failures += 1
        assert_consistent(engine)
    assert_nothing_leaked(engine)
    assert failures == 1
    assert_expected(
        engine, *(r for r in requests if all(s.finish_reason != "abort" for s in r.sequences))
    )


def test_beams_cannot_be_masked():
    engine = make_engine()
    request = make_beam_request("b", [1], width=2, max_tokens=3)
    request.mask_source = FakeMaskSource()
    with pytest.raises(ValueError, match="beams cannot be constrained by masks"):
        engine.add(request)
    assert not engine.has_unfinished_requests()


def forcing(name: str, prompt: list[int], *delays: int, fails_after=None, **options):
    source = FakeMaskSource(len(name), delays or (0,), forces=True, fails_after=fails_after)
    return make_request(name, prompt, mask_source=source, **options)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("delays", [(0,), (2, 0), (UNTIL_WAITED_FOR, 0)])
def test_forced_tokens_are_those_of_the_plain_loop(overlap, decode_steps, delays):
    engine = make_engine(overlap=overlap, decode_steps=decode_steps, max_num_batched_tokens=7)
    requests = [
        forcing("f" * i, [1, 2, 3] * i, *delays, max_tokens=20, eos=(3,), stop=["ab"])
        for i in range(1, 6)
    ]
    requests += [make_request(str(i), [1, 2, 3] * 3, seed=i, max_tokens=15) for i in range(3)]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert any(plan.forced_tokens for plan in engine.runner.plans)


def test_forced_tokens_are_computed_in_one_row():
    engine = make_engine(overlap=False)
    request = forcing("ff", [1, 2, 3], max_tokens=30, ignore_eos=True)
    run(engine, request)
    assert_expected(engine, request)
    output, source = request.sequences[0].output_token_ids, request.mask_source
    num_sampled = sum(plan.samples.count(True) for plan in engine.runner.plans)
    assert num_sampled < len(output)
    # Beside the prompt's step: one for each sampled token, and one if tokens are forced before the first.
    begins_forced = bool(source.forced_run(0, []))
    assert len(engine.steps) == num_sampled + begins_forced
    assert sum(plan.total_tokens for plan in engine.runner.plans) == 3 + len(output) - 1


@pytest.mark.parametrize("delays", [(0,), (2,), (0, 3)])
@pytest.mark.parametrize("overlap", [False, True])
def test_siblings_go_on_from_what_is_forced_behind_the_prompt(delays, overlap):
    engine = make_engine(overlap=overlap)
    seeds = [i for i in range(40) if FakeMaskSource(i, forces=True).forced_run(0, [])]
    request = make_request("a", [1] * 10, n=3, max_tokens=12, ignore_eos=True)
    request.mask_source = FakeMaskSource(seeds[0], delays, forces=True)
    request.slot_fields = request.slot_fields | {"is_masked": True}
    run(engine, request)
    assert_expected(engine, request)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_forced_tokens_survive_preemption(overlap, preemption_mode):
    engine = make_engine(
        num_blocks=10, num_host_blocks=20, preemption_mode=preemption_mode, overlap=overlap
    )
    requests = [forcing("f" * i, [i] * 9, max_tokens=24, ignore_eos=True) for i in range(1, 4)]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_sequence_whose_masks_stop_coming_ends_and_the_others_go_on(overlap, alone):
    engine = make_engine(overlap=overlap)
    failing = forcing("ff", [1, 2], fails_after=4, max_tokens=20, ignore_eos=True)
    others = [] if alone else [make_request("b", [3], max_tokens=12, ignore_eos=True)]
    run(engine, failing, *others)
    assert_expected(engine, failing, *others)
    (sequence,) = failing.sequences
    assert sequence.finish_reason == "error" and sequence.stop_reason == "no mask after 4 tokens"


def test_without_late_sampling_a_row_waits_for_its_token_and_others_do_not():
    engine = make_engine(overlap=True, samples_late=False)
    constrained = [masked(name, [1, 2], 0, max_tokens=6, ignore_eos=True) for name in ("a", "bb")]
    free = make_request("free", [3], max_tokens=12, ignore_eos=True)
    run(engine, *constrained, free)
    assert_expected(engine, *constrained, free)
    plans = engine.runner.plans
    assert not any(plan.num_late_rows for plan in plans)
    assert all(all(plan.samples) for plan in plans)
    assert len(plans) <= 13  # one for each token of the longest, and one that is thrown away
