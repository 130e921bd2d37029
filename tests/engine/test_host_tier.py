"""Swapping and the host tier: what moves where, and that it changes no token."""

from __future__ import annotations

import pytest

from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.host_tier import HostTier
from tests.engine.harness import assert_expected, finish, make_engine, run
from tests.fakes import FakeStore, make_request

PROMPT = [i % 7 for i in range(12)]


def transfers_of(engine, kind):
    transfers = [plan.transfers for plan in engine.runner.plans if plan.transfers is not None]
    return [move for each in transfers for move in getattr(each, kind)]


def test_a_swapped_sequence_comes_back_without_computing_anything_twice():
    def computed(**options):
        engine = make_engine(num_blocks=11, enable_prefix_caching=False, **options)
        requests = [make_request(str(i), [i] * 8, max_tokens=16) for i in range(3)]
        run(engine, *requests)
        assert_expected(engine, *requests)
        assert engine.stats().num_preemptions > 0
        return engine, engine.runner.num_computed_tokens

    swapping, with_swap = computed(num_host_blocks=20, preemption_mode="swap")
    _, without = computed()
    assert with_swap == 3 * (8 + 16 - 1) < without
    assert transfers_of(swapping, "swaps_out") and transfers_of(swapping, "swaps_in")


def test_unless_told_only_requests_of_several_sequences_are_swapped():
    for n, swaps in ((1, False), (2, True)):
        engine = make_engine(num_blocks=11, num_host_blocks=20, enable_prefix_caching=False)
        requests = [make_request(str(i), [i] * 8, n=n, max_tokens=14, seed=i) for i in range(4)]
        run(engine, *requests)
        assert_expected(engine, *requests)
        assert engine.stats().num_preemptions > 0
        assert bool(transfers_of(engine, "swaps_out")) == swaps


def test_siblings_that_are_preempted_together_keep_sharing():
    pool = BlockPool(20, 4, enable_prefix_caching=False)
    tier = HostTier(10, pool)
    shared, own = pool.allocate(3), pool.allocate(2)
    pool.fork(shared)
    first, second = (tier.swap_out([[*shared, block_id]])[0] for block_id in own)
    assert first[:3] == second[:3] and len({*first, *second}) == 5
    pool.free([*shared, own[0]])
    pool.free([*shared, own[1]])
    transfers = tier.take_transfers()
    assert len(transfers.swaps_out) == 5  # each block travels once
    tier.begin_plan()
    back = [
        [tier.swap_in(host_id, share=i < 3) for i, host_id in enumerate(x)] for x in (first, second)
    ]
    assert back[0][:3] == back[1][:3] and back[0][3] != back[1][3]
    assert [pool.refs[block_id] for block_id in back[0]] == [2, 2, 2, 1]


def test_without_room_on_the_host_it_is_computed_anew():
    engine = make_engine(num_blocks=11, num_host_blocks=1, preemption_mode="swap")
    requests = [make_request(str(i), [i] * 8, max_tokens=16) for i in range(3)]
    run(engine, *requests)
    assert_expected(engine, *requests)


def test_an_evicted_prefix_is_found_on_the_host():
    engine = make_engine(num_blocks=9, num_host_blocks=20)
    run(engine, make_request("first", PROMPT, max_tokens=2))
    run(engine, make_request("other", [9] * 30, max_tokens=2))  # takes all blocks
    before = engine.runner.num_computed_tokens
    again = make_request("again", PROMPT, max_tokens=2)
    run(engine, again)
    assert_expected(engine, again)
    assert again.num_cached_tokens == 8 and engine.runner.num_computed_tokens - before == 5
    stats = engine.stats()
    assert stats.num_host_hit_blocks == 2 and stats.num_blocks_swapped_in == 2
    found = make_request("found", PROMPT, max_tokens=2)
    run(engine, found)
    assert found.num_cached_tokens == 8
    assert engine.stats().num_host_hit_blocks == 2  # on the device this time


def test_least_recently_used_host_blocks_go_first_and_tails_before_heads():
    pool = BlockPool(9, 4, enable_prefix_caching=True)
    tier = HostTier(4, pool)

    def evict(*names):
        """A sequence of so many blocks comes and goes, and its blocks are all handed out again."""
        ids = pool.allocate(len(names))
        for block_id, name in zip(ids, names, strict=True):
            pool.register(block_id, name)
        pool.free(ids)
        pool.free(pool.allocate(8))
        tier.begin_plan()
        return tier.take_transfers()

    assert len(evict(b"a0", b"a1").swaps_out) == 2
    evict(b"b0", b"b1")
    tier.begin_plan()
    assert tier.find(b"a0") and tier.find(b"a1")  # used last now
    tier.take_transfers()
    evict(b"c0", b"c1")
    tier.begin_plan()
    assert not tier.find(b"b0") and not tier.find(b"b1") and tier.find(b"a0") and tier.find(b"c0")
    tier.take_transfers()
    tier.begin_plan()
    evict(*(b"d%d" % i for i in range(6)))  # more than there is room for
    tier.begin_plan()
    assert [bool(tier.find(b"d%d" % i)) for i in range(6)] == [True] * 4 + [False] * 2


def test_what_plans_without_rows_find_is_held_once():
    pool = BlockPool(9, 4, enable_prefix_caching=True)
    tier = HostTier(4, pool)
    pool.register(*(block_id := pool.allocate(1)), b"a")
    pool.free(block_id)
    pool.free(pool.allocate(8))
    assert len(tier.take_transfers().swaps_out) == 1
    for _ in range(3):  # of these plans nothing is taken, as there is nothing to launch
        tier.begin_plan()
        host_id = tier.find(b"a")
        assert tier.pool.refs[host_id] == 1
    tier.begin_plan()
    assert tier.pool.refs[host_id] == 0


def test_what_the_host_loses_is_found_in_the_store_by_another_engine():
    store = FakeStore()
    engine = make_engine(num_blocks=9, num_host_blocks=2, store=store)
    run(engine, make_request("first", PROMPT, max_tokens=2))
    for i in range(3):
        run(engine, make_request(str(i), [7 + i] * 30, max_tokens=2))
    assert len(store.content) >= 2
    other = make_engine(num_blocks=9, num_host_blocks=2, store=store)
    request = make_request("first", PROMPT, max_tokens=2)
    run(other, request)
    assert_expected(other, request)
    assert request.num_cached_tokens == 8 and other.stats().num_disk_hit_blocks == 2


def test_what_is_saved_at_the_end_is_found_by_another_engine():
    store = FakeStore()
    engine = make_engine(num_host_blocks=2, store=store)
    run(engine, make_request("first", PROMPT, max_tokens=2))
    assert not store.content
    engine.save_prefix_cache()
    other = make_engine(num_host_blocks=2, store=store)
    request = make_request("first", PROMPT, max_tokens=2)
    run(other, request)
    assert_expected(other, request)
    assert request.num_cached_tokens == 8 and other.stats().num_disk_hit_blocks == 2


def test_a_damaged_block_of_the_store_is_computed():
    store = FakeStore()
    engine = make_engine(num_blocks=9, num_host_blocks=2, store=store)
    run(engine, make_request("first", PROMPT, max_tokens=2))
    for i in range(3):
        run(engine, make_request(str(i), [7 + i] * 30, max_tokens=2))
    store.damaged = set(store.content)
    request = make_request("first", PROMPT, max_tokens=2)
    other = make_engine(num_blocks=9, num_host_blocks=2, store=store)
    run(other, request)
    assert_expected(other, request)
    assert request.num_cached_tokens == 0


def test_after_a_weight_epoch_nothing_is_found_on_host_or_disk():
    store = FakeStore()
    engine = make_engine(num_blocks=9, num_host_blocks=20, store=store)
    run(engine, make_request("first", PROMPT, max_tokens=2))
    run(engine, make_request("other", [9] * 30, max_tokens=2))
    engine.scheduler.begin_weight_epoch()
    again = make_request("again", PROMPT, max_tokens=2)
    run(engine, again)
    assert again.num_cached_tokens == 0 and engine.scheduler.kv.tier.store is None


def test_what_new_weights_compute_is_not_stored_as_that_of_the_old_ones():
    """Also where the cache is kept: another process would find it under its own weights."""
    store = FakeStore()
    engine = make_engine(num_blocks=9, num_host_blocks=2, store=store)
    run(engine, make_request("first", PROMPT, max_tokens=2))
    engine.scheduler.begin_weight_epoch(keep_cache=True)
    again = make_request("again", PROMPT, max_tokens=2)
    run(engine, again)
    assert again.num_cached_tokens > 0
    for i in range(3):
        run(engine, make_request(str(i), [7 + i] * 30, max_tokens=2))
    engine.save_prefix_cache()
    assert not store.content


def test_after_a_reset_nothing_is_found_on_the_host():
    engine = make_engine(num_blocks=9, num_host_blocks=20)
    run(engine, make_request("first", PROMPT, max_tokens=2))
    run(engine, make_request("other", [9] * 30, max_tokens=2))
    assert engine.stats().num_blocks_swapped_out > 0
    assert engine.reset_prefix_cache()
    again = make_request("again", PROMPT, max_tokens=2)
    run(engine, again)
    assert_expected(engine, again)
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("kind", ["fail_launch", "fail_collect"])
@pytest.mark.parametrize("number", range(2, 12))
@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_failed_step_the_others_end_as_expected(kind, number, overlap):
    engine = make_engine(
        num_blocks=11,
        num_host_blocks=20,
        preemption_mode="swap",
        overlap=overlap,
        store=FakeStore(),
        **{kind: (number,)},
    )
    requests = [make_request(str(i), [i] * 8, max_tokens=16) for i in range(4)]
    for request in requests:
        engine.add(request)
    failures = 0
    while engine.has_unfinished_requests():
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    finish(engine)
    assert failures == 1
    aborted = [r for r in requests if r.sequences[0].finish_reason == "abort"]
    assert 0 < len(aborted) < 4
    assert_expected(engine, *(r for r in requests if r not in aborted))
