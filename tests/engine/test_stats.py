"""Waste in the pool: what is counted with every step is what an account of every slot finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxpage.engine.counters import num_computed_slots
from jaxpage.engine.stats import total
from jaxpage.plan import NULL_BLOCK
from tests.engine.harness import make_engine, run
from tests.fakes import FakeMaskSource, make_beam_request, make_request


def account(scheduler, step) -> tuple[int, int]:
    """(allocated, unused) slots, one by one: a slot is used if it lies before a holder's end."""
    size, plan = scheduler.kv.pool.block_size, step.plan
    ends = {
        id(s): start + count
        for s, start, count in zip(step.sequences, plan.starts, plan.num_tokens, strict=True)
    }
    allocated, used = set(), set()
    for sequence in scheduler.running:
        end = ends.get(id(sequence), num_computed_slots(sequence))
        entries = (entry for table in sequence.block_tables for entry in enumerate(table))
        for index, block_id in entries:
            for offset in range(size) if block_id != NULL_BLOCK else ():
                allocated.add((block_id, offset))
                if index * size + offset < end:
                    used.add((block_id, offset))
    return len(allocated), len(allocated - used)


def check_each_step(engine):
    """Have every plan's counters compared with the account. Returns the list of (allocated, unused)."""
    seen = []
    schedule, counters = engine.scheduler.schedule, engine.scheduler.counters

    def checked():
        step = schedule()
        if step is not None:
            seen.append(account(engine.scheduler, step))
            assert (counters.num_allocated_slots, counters.num_unused_slots) == seen[-1]
        return step

    engine.scheduler.schedule = checked
    return seen


def one_request(engine, length, **params):
    seen = check_each_step(engine)
    run(engine, make_request("a", [1] * length, ignore_eos=True, **params))
    return seen


def test_the_free_part_of_the_last_block_is_waste():
    seen = one_request(make_engine(block_size=4), 5, max_tokens=5)
    # 5 tokens of prompt and then one a step; the token sampled last is never computed
    assert seen == [(8, 3), (8, 2), (8, 1), (8, 0), (12, 3)]


def test_blocks_of_a_prompt_that_is_not_computed_yet_are_waste():
    seen = one_request(make_engine(block_size=4, max_num_batched_tokens=4), 12, max_tokens=1)
    assert seen == [(12, 8), (12, 4), (12, 0)]


def test_what_a_launch_of_several_steps_writes_after_the_first_is_waste_while_it_starts():
    seen = one_request(make_engine(block_size=4, decode_steps=8), 4, max_tokens=10)
    # 4, then 8 steps from the 5th token: 12 tokens in 3 blocks, 5 of them computed at first
    assert seen == [(4, 0), (12, 7), (16, 3)]


def test_a_shared_block_counts_once():
    engine = make_engine(block_size=4)
    seen = one_request(engine, 6, n=3, max_tokens=2)
    # The prompt's 6 tokens in 2 shared blocks, then one full shared block and three of 3 tokens.
    assert seen == [(8, 2), (16, 3)]
    stats = engine.stats()
    assert stats.kv_waste == 3 / 16 and stats.mean_kv_waste == 5 / 24
    assert (stats.num_allocated_slot_steps, stats.num_unused_slot_steps) == (24, 5)


def test_sharing_is_references_over_blocks():
    engine = make_engine(block_size=4)
    engine.add(make_request("a", [1] * 8, n=4, max_tokens=9, ignore_eos=True))
    engine.step()
    stats = engine.stats()
    assert (stats.num_blocks, stats.num_blocks_used, stats.num_block_references) == (99, 2, 8)
    assert stats.kv_cache_usage == pytest.approx(2 / 99)
    engine.abort("a")
    stats = engine.stats()
    assert (stats.num_blocks_used, stats.num_block_references) == (0, 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("decode_steps", [pytest.param(1, marks=pytest.mark.slow), 3, 8])
@pytest.mark.parametrize("windows", [(None,), (6, 9, None)])
@pytest.mark.parametrize(
    ("num_blocks", "num_host_blocks"),
    [
        (17, 0),
        (17, 20),
        pytest.param(30, 0, marks=pytest.mark.slow),
        pytest.param(200, 0, marks=pytest.mark.slow),
    ],
)
def test_every_step_of_mixed_work_is_accounted_for(
    overlap, decode_steps, num_blocks, num_host_blocks, windows
):
    """Chunks, hits, siblings, beams, preemptions, swaps, steps that leave sequences out, masks, windows."""
    engine = make_engine(
        windows=windows,
        num_blocks=len(windows) * num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=7,
        overlap=overlap,
        decode_steps=decode_steps,
    )
    seen = check_each_step(engine)
    requests = [
        make_request(
            str(i),
            ([5, 6, 7] * 9)[: 3 + 5 * i % 23],
            n=1 + i % 4,
            max_tokens=3 + 4 * i % 13,
            seed=i,
            eos=(0,),
            mask_source=FakeMaskSource(i, (0, 2, -1)) if i % 3 == 0 else None,
        )
        for i in range(16)
    ]
    beams = [
        make_beam_request(f"beam {i}", [5, 6, 7, 8, i], width=2 + i, max_tokens=7) for i in range(2)
    ]
    run(engine, *requests[:8], *beams, *requests[8:])
    stats = engine.stats()
    assert stats.num_steps == len(seen)
    totals = [sum(column) for column in zip(*seen, strict=True)]
    assert [stats.num_allocated_slot_steps, stats.num_unused_slot_steps] == totals
    assert stats.kv_waste == seen[-1][1] / seen[-1][0]


def test_an_engine_that_has_done_nothing_wastes_nothing():
    stats = make_engine().stats()
    assert stats.kv_waste == stats.mean_kv_waste == 0


def test_loads_of_experts_add_up_over_steps_and_replicas():
    engine = make_engine()
    collect = engine.runner.collect
    load = np.array([[2**31 - 1, 0], [3, 1]], np.int32)
    engine.runner.collect = lambda launched: replace(collect(launched), expert_load=load)
    idle = engine.stats()
    assert idle.expert_load == () and idle.expert_imbalance == ()
    run(engine, make_request("a", [1, 2, 3], ignore_eos=True, max_tokens=2))
    stats = engine.stats()
    assert stats.num_steps == 2 and stats.expert_load == ((2**32 - 2, 0), (6, 2))
    assert stats.expert_imbalance == (2.0, 1.5)
    both = total([stats, idle, stats])
    assert both.expert_load == ((2**33 - 4, 0), (12, 4)) and both.expert_imbalance == (2.0, 1.5)
