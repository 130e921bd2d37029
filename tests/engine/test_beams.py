"""Beam search: the search itself, and its rows, slots and blocks in the engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.engine.beams import Beams
from jaxpage.kv_groups import most_blocks, num_seen_blocks
from tests.engine.events import aborts, arrivals, events, play
from tests.engine.harness import assert_consistent, assert_expected, finish, make_engine, run
from tests.engine.test_any_workload import MAX_MODEL_LEN, engines, requests, token
from tests.fakes import expected_beams, make_beam_request, make_request


def results(request) -> list[tuple[float, list[int]]]:
    """(score, output) of each hypothesis."""
    return [(h.score, [b.token_id for b in h.beam.path()]) for h in request.beams.ended]


def assert_expected_beams(request) -> None:
    assert request.finished and request.beams.done
    assert results(request) == expected_beams(request)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_are_those_of_the_plain_search(width, overlap):
    engine = make_engine(overlap=overlap)
    request = make_beam_request("a", [1, 2, 3, 4, 5], width=width, max_tokens=12)
    run(engine, request)
    assert_expected_beams(request)


def plain_search(logprobs, *, width, max_tokens, eos, length_penalty, early_stopping):
    """transformers' search over a Markov chain: logprobs float64[V, V], the first token follows id 0.

    Dense arrays of `width` beams, a fixed number of which are not there yet (-1e9), as torch has them.
    """
    vocab_size = len(logprobs)
    keep = max(2, 1 + len(eos)) * width
    totals = np.full(width, -1e9)
    totals[0] = 0
    outputs, ended = [[0]] * width, []
    for length in range(1, max_tokens + 1):
        scores = np.stack([t + logprobs[o[-1]] for t, o in zip(totals, outputs, strict=True)])
        best = np.argsort(-scores.ravel(), kind="stable")[:keep]
        totals, tokens = scores.ravel()[best], best % vocab_size
        outputs = [[*outputs[b // vocab_size], int(t)] for b, t in zip(best, tokens, strict=True)]
        stops = np.isin(tokens, list(eos)) | (length == max_tokens)
        for i in np.flatnonzero(stops[:width]):
            ended.append((totals[i] / length**length_penalty, outputs[i][1:]))
        ended = sorted(ended, key=lambda x: -x[0])[:width]
        if length == max_tokens:
            break
        goes_on = np.flatnonzero(~stops)[:width]
        totals, outputs = totals[goes_on], [outputs[i] for i in goes_on]
        if len(ended) == width:
            hopeful = early_stopping == "never" and length_penalty > 0
            best_score = totals[0] / (max_tokens if hopeful else length) ** length_penalty
            if early_stopping is True or best_score <= ended[-1][0]:
                break
    return ended


searches = given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sets(st.integers(1, 19), max_size=3),
    st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([False, True, "never"]),
)


@settings(max_examples=60, deadline=None)
@searches
def test_search_equals_the_plain_one(seed, width, max_tokens, eos, length_penalty, early_stopping):
    check_search(seed, width, max_tokens, eos, length_penalty, early_stopping)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@searches
def test_search_equals_the_plain_one_in_depth(
    seed, width, max_tokens, eos, length_penalty, early_stopping
):
    check_search(seed, width, max_tokens, eos, length_penalty, early_stopping)


def check_search(seed, width, max_tokens, eos, length_penalty, early_stopping):
    logits = np.random.default_rng(seed).normal(0, 2, (20, 20))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    beams = Beams(width, max_tokens, eos_token_ids=frozenset(eos), **options)
    while not beams.done:
        rows = [logprobs[max(beam.token_id, 0)] for beam in beams.live]
        best = [np.argsort(-row)[: beams.num_candidates] for row in rows]
        survivors = beams.advance(
            [
                list(zip(b.tolist(), r[b].tolist(), strict=True))
                for b, r in zip(best, rows, strict=True)
            ]
        )
        assert beams.done or [s.token_id for s in survivors] == [b.token_id for b in beams.live]
    wanted = plain_search(logprobs, width=width, max_tokens=max_tokens, eos=eos, **options)
    found = [(h.score, [b.token_id for b in h.beam.path()]) for h in beams.ended]
    assert [tokens for _, tokens in found] == [tokens for _, tokens in wanted]
    assert np.allclose([score for score, _ in found], [score for score, _ in wanted], atol=1e-12)
    assert len(found) == width


def test_prompt_is_computed_once_and_at_most_one_block_is_copied_for_each_beam():
    engine = make_engine(block_size=4)
    request = make_beam_request("a", [i % 7 for i in range(11)], width=4, max_tokens=14)
    run(engine, request)
    assert engine.runner.num_computed_tokens == 11 + 4 * 13
    copies = [len(plan.block_copies) for plan in engine.runner.plans]
    assert 0 < max(copies) <= 3  # of beams that share a block, the last to write keeps it
    assert sum(copies) == engine.stats().num_block_copies
    assert_expected_beams(request)


def test_beams_share_the_blocks_of_their_past():
    engine = make_engine(block_size=4)
    request = make_beam_request("a", [1] * 40, width=4, max_tokens=8)
    engine.add(request)
    for _ in range(6):
        engine.step()
    first, *others = request.sequences
    assert all(s.block_tables[0][:10] == first.block_tables[0][:10] for s in others)
    assert (
        len({block_id for s in request.sequences for block_id in s.block_tables[0]}) <= 10 + 4 * 2
    )
    finish(engine)


def test_beams_take_all_their_slots_at_once():
    engine = make_engine(max_num_seqs=5)
    beams = make_beam_request("b", [1, 2], width=4, max_tokens=4)
    others = [make_request(name, [3], max_tokens=6) for name in "acd"]
    engine.add(others[0])
    engine.add(others[1])
    engine.add(beams)
    engine.add(others[2])
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.running] == ["a", "c"]
    finish(engine)
    assert_expected(engine, *others)
    assert_expected_beams(beams)


def test_beams_are_preempted_together_and_come_back_together():
    """There are blocks for either, and the answer to the first request grows into those of the beams."""
    engine = make_engine(num_blocks=14, block_size=2, enable_prefix_caching=False)
    other = make_request("a", [1] * 6, max_tokens=20)
    beams = make_beam_request("b", [2] * 7, width=3, max_tokens=6)
    engine.add(other)
    engine.add(beams)
    seen = set()
    while engine.has_unfinished_requests():
        engine.step()
        assert_consistent(engine)
        seen.add(sum(s.slot > 0 for s in beams.sequences))
    assert seen == {0, 3} and beams.num_preemptions > 0
    assert_expected(engine, other)
    assert_expected_beams(beams)


def test_prompt_longer_than_the_pool_leaves_its_window_behind():
    """Six tokens in the room of two, a token in each step."""
    engine = make_engine(
        block_size=1,
        windows=(1,),
        num_blocks=3,
        enable_prefix_caching=False,
        max_num_batched_tokens=1,
    )
    beams = make_beam_request("b", [0, 1, 2, 0, 1, 2], width=1, max_tokens=1)
    run(engine, beams)
    assert beams.num_preemptions == 0
    assert_expected_beams(beams)


def test_several_steps_in_a_launch_wait_for_the_end_of_the_beams():
    engine = make_engine(decode_steps=4)
    beams = make_beam_request("b", [2, 3], width=2, max_tokens=5)
    other = make_request("a", [1], max_tokens=30)
    run(engine, other, beams)
    with_beams = [x.plan for x in engine.steps if any(s.request is beams for s in x.sequences)]
    assert {plan.num_steps for plan in with_beams} == {1}
    assert max(plan.num_steps for plan in engine.runner.plans) == 4
    assert_expected(engine, other)


@pytest.mark.parametrize("overlap", [False, True])
def test_failed_step_ends_the_beams_in_it(overlap):
    engine = make_engine(overlap=overlap, fail_collect=(3,))
    beams = make_beam_request("b", [2, 3], width=3, max_tokens=9)
    engine.add(beams)
    with pytest.raises(RuntimeError, match="step 3 fails"):
        finish(engine)
    finish(engine)
    assert {str(s.finish_reason) for s in beams.sequences} == {"abort"}
    again = make_beam_request("c", [2, 3], width=3, max_tokens=9)
    run(engine, again)
    assert_expected_beams(again)


def test_beams_that_could_never_run_are_refused():
    engine = make_engine(num_blocks=11, block_size=4, max_num_seqs=4)
    with pytest.raises(ValueError, match="beam width of 5 .* max_num_seqs is 4"):
        engine.add(make_beam_request("a", [1], width=5, max_tokens=4))
    with pytest.raises(ValueError, match="2 beams .* may need 12 blocks of 4, but the pool has 10"):
        engine.add(make_beam_request("a", [1], width=2, max_tokens=24))
    assert not engine.has_unfinished_requests()
    run(engine, make_beam_request("a", [1], width=2, max_tokens=20))


@st.composite
def beam_requests(draw):
    """Prompt, arguments of `make_beam_request`, step of its arrival, steps until it is aborted (None: never)."""
    prefix = draw(st.sampled_from([[], [i % 5 for i in range(20)]]))
    prompt = prefix[: draw(st.integers(0, 12))] + draw(st.lists(token, min_size=1, max_size=3))
    options = {
        "width": draw(st.integers(1, 4)),
        "max_tokens": draw(st.integers(1, 16)),
        "eos_token_ids": frozenset(draw(st.sampled_from([(), (3,), (7,)]))),
        "length_penalty": draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])),
        "early_stopping": draw(st.sampled_from([False, True, "never"])),
        "seed": draw(st.integers(0, 3)),
        "priority": draw(st.integers(0, 2)),
        "salt": draw(st.sampled_from([None, None, "a"])),
    }
    return prompt, options, draw(arrivals), draw(aborts)


def most_blocks_of_beams(workload: list, options: dict) -> int:
    """Blocks of the beams that want most, when they share nothing but the prompt."""
    block_size, windows = options["block_size"], options["windows"]
    seen = num_seen_blocks(windows, block_size, options["max_num_batched_tokens"])
    wanted = []
    for prompt, search, _, _ in workload:
        shared = len(prompt) // block_size
        own = search["width"] * (
            -(-(len(prompt) + search["max_tokens"] - 1) // block_size) - shared
        )
        wanted.append(sum(own + (min(shared, seen) if w else shared) for w in windows))
    return max(wanted)


def check_beams_in_company(
    options: dict, beams: list, others: list, num_spare: int, events: dict[int, str]
) -> None:
    """`num_spare` blocks more than the largest request wants."""
    sizes = options["block_size"], options["max_num_batched_tokens"]
    of_others = most_blocks(options["windows"], MAX_MODEL_LEN - 1, *sizes)
    smallest = max(of_others, most_blocks_of_beams(beams, options))
    options = options | {
        "num_blocks": 1 + smallest + num_spare,
        # SequenceFootprint beside the widest beams, else nobody would ever be in their way.
        "max_num_seqs": options["max_num_seqs"] - 1 + max(b["width"] for _, b, _, _ in beams),
    }
    engine = make_engine(**options)
    todo = [(make_beam_request(f"b{i}", x[0], **x[1]), *x[2:]) for i, x in enumerate(beams)]
    todo += [(make_request(str(i), x[0], **x[1]), *x[2:]) for i, x in enumerate(others)]
    whole = play(engine, todo, events)
    for request, _, _ in todo:
        if request.beams is None:
            if request in whole:
                assert_expected(engine, request)
        elif request in whole or request.beams.done:
            assert_expected_beams(request)
    for plan in engine.runner.plans:
        assert len(plan.block_copies) <= plan.num_rows * len(options["windows"])


spare_blocks = st.sampled_from([0, 0, 0, 1, 5, 100])


@settings(max_examples=30, deadline=None)
@given(
    engines(may_be_recurrent=False),
    st.lists(beam_requests(), min_size=1, max_size=3),
    st.lists(requests(), max_size=4),
    spare_blocks,
    events,
)
def test_beams_do_not_depend_on_the_engine_or_on_the_company(
    options, beams, others, num_spare, events
):
    check_beams_in_company(options, beams, others, num_spare, events)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    engines(may_be_recurrent=False),
    st.lists(beam_requests(), min_size=2, max_size=5),
    st.lists(requests(), max_size=6),
    spare_blocks,
    events,
)
def test_beams_do_not_depend_on_the_engine_or_on_the_company_in_depth(
    options, beams, others, num_spare, events
):
    check_beams_in_company(options, beams, others, num_spare, events)


@pytest.mark.deep
def test_beams_do_not_depend_on_the_engine_or_on_the_company_in_4_000_examples():
    beams = st.lists(beam_requests(), min_size=2, max_size=5)
    workloads = given(
        engines(may_be_recurrent=False),
        beams,
        st.lists(requests(), max_size=6),
        spare_blocks,
        events,
    )
    settings(max_examples=4000, deadline=None)(workloads(check_beams_in_company))()
