"""Snapshots of the pool: arrays that agree with the pool's own account, at moments one can follow by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxpage.engine.block_hashes import hash_block, root_hash
from jaxpage.engine.snapshot import DEVICE, HOST, take_snapshot
from tests.engine.harness import make_engine
from tests.fakes import make_request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def chain(token_ids, block_size=4):
    """First 8 bytes of the hashes of a prompt's full blocks, as `hash_block` defines them."""
    hashes = [root_hash(0)]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        hashes.append(hash_block(hashes[-1], token_ids[start : start + block_size]))
    return [int(np.frombuffer(block_hash[:8], np.uint64)[0]) for block_hash in hashes[1:]]


def test_owners_references_and_used_slots_of_two_samples():
    engine = make_engine(num_blocks=12)
    engine.add(make_request("a", PROMPT, n=2, max_tokens=9, ignore_eos=True))
    engine.step()
    shot = take_snapshot(engine.scheduler)
    assert shot.sequences == (("a", 0), ("a", 1))
    assert shot.block_tables.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert shot.owners[:5].tolist() == [-1, 0, 0, 0, -1]
    assert shot.references[:5].tolist() == [0, 2, 2, 2, 0]
    assert shot.used_slots[:5].tolist() == [0, 4, 4, 2, 0]
    engine.step()  # the first to write gets a copy of block 3
    shot = take_snapshot(engine.scheduler)
    assert shot.block_tables.tolist() == [[1, 2, 4], [1, 2, 3]]
    assert shot.owners[:6].tolist() == [-1, 0, 0, 1, 0, -1]
    assert shot.references[:6].tolist() == [0, 2, 2, 1, 1, 0]
    assert shot.used_slots[:6].tolist() == [0, 4, 4, 3, 3, 0]
    assert shot.num_steps == 2 and shot.num_blocks_used == 4 and shot.num_allocated_slots == 16


def test_hashes_parents_and_hits_tell_the_tree_of_prefixes():
    engine = make_engine(num_blocks=12)
    for name in "abc":
        engine.add(make_request(name, PROMPT, max_tokens=1))
        engine.step()
    first, second = chain(PROMPT)
    shot = take_snapshot(engine.scheduler)
    assert shot.hashes[:5].tolist() == [0, first, second, 0, 0]
    assert shot.parents[:5].tolist() == [0, 0, first, 0, 0]
    assert shot.hits[:5].tolist() == [0, 2, 2, 0, 0]
    assert engine.reset_prefix_cache()
    shot = take_snapshot(engine.scheduler)
    assert not shot.hashes.any() and not shot.parents.any() and not shot.hits.any()


def test_eviction_order_is_the_order_in_which_blocks_are_handed_out():
    engine = make_engine(num_blocks=8)
    engine.add(make_request("a", PROMPT, max_tokens=1))
    engine.step()
    shot = take_snapshot(engine.scheduler)
    assert shot.eviction_order[0] == -1
    queue = np.argsort(shot.eviction_order)[1:]
    # Without a hash: 3, just freed, then those never used; cached ones last, the deeper one first.
    assert queue.tolist() == [3, 4, 5, 6, 7, 2, 1]
    assert engine.scheduler.kv.pool.allocate(7) == queue.tolist()
    assert take_snapshot(engine.scheduler).eviction_order.tolist() == [-1] * 8


def test_unused_slots_by_cause():
    engine = make_engine(max_num_batched_tokens=6)
    engine.add(make_request("a", PROMPT + PROMPT, max_tokens=9))
    engine.step()  # 6 of 20 tokens, in 5 blocks
    shot = take_snapshot(engine.scheduler)
    assert shot.unused_slots == {"partial": 2, "ahead": 12}
    assert shot.num_allocated_slots == 20


def test_a_launch_of_several_steps_in_flight_holds_blocks_ahead():
    engine = make_engine(overlap=True, decode_steps=8)
    engine.add(make_request("a", PROMPT[:4], max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    # 4 tokens of prompt and one sampled, then 8 more, all collected; in flight are 8 from the 13th on.
    shot = take_snapshot(engine.scheduler)
    (sequence,) = engine.scheduler.running
    assert len(sequence.token_ids) == 13 and sequence.num_computed_tokens == 20
    assert shot.used_slots[shot.block_tables[0]].tolist() == [4, 4, 4, 1, 0]
    assert shot.unused_slots == {"partial": 3, "ahead": 4}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_snapshot_agrees_with_stats_and_changes_nothing(overlap):
    engine = make_engine(num_blocks=17, max_num_batched_tokens=7, overlap=overlap)
    for i in range(9):
        engine.add(make_request(str(i), PROMPT[: 3 + i], n=1 + i % 3, max_tokens=8, seed=i))
    while engine.has_unfinished_requests():
        engine.step()
        shot, stats = take_snapshot(engine.scheduler), engine.stats()
        assert shot.num_blocks_used == stats.num_blocks_used
        assert shot.references.sum() == stats.num_block_references
        assert (shot.eviction_order >= 0).sum() == stats.num_blocks - stats.num_blocks_used
        assert len(shot.sequences) == stats.num_running
        assert ((shot.owners >= 0) == (shot.references > 0)).all()
        again = take_snapshot(engine.scheduler)
        for field in dataclasses.fields(shot):
            np.testing.assert_array_equal(getattr(shot, field.name), getattr(again, field.name))


def test_blocks_on_the_host_follow_those_of_the_device():
    engine = make_engine(num_blocks=7, num_host_blocks=5, preemption_mode="swap")
    for name, length in (("a", 10), ("b", 6)):
        engine.add(make_request(name, [int(name, 16)] * length, max_tokens=9, ignore_eos=True))
    engine.step()
    shot = take_snapshot(engine.scheduler)
    assert shot.tiers.tolist() == [DEVICE] * 7 + [HOST] * 6
    assert shot.block_tables.tolist() == [[1, 2, 3], [4, 5, 0]]
    while engine.scheduler.running[-1].request.request_id == "b":
        engine.step()
    shot = take_snapshot(engine.scheduler)  # b was preempted, with the KV of 8 tokens
    assert shot.sequences == (("a", 0), ("b", 0))
    assert shot.tiers[shot.block_tables[1, :2]].tolist() == [HOST, HOST]
    assert shot.used_slots[shot.block_tables[1, :2]].tolist() == [4, 4]
    assert shot.owners[7:].tolist().count(1) == 2
    assert shot.num_blocks_used == engine.stats().num_blocks_used == 4
    assert shot.eviction_order[7:].max() < 5 and shot.eviction_order[7] == -1


def test_an_idle_pool_has_a_snapshot_too():
    shot = take_snapshot(make_engine(num_blocks=4).scheduler)
    assert shot.block_tables.shape == (0, 0) and shot.num_blocks_used == 0
    assert shot.unused_slots == {"partial": 0, "ahead": 0}
    assert shot.eviction_order.tolist() == [-1, 0, 1, 2]
