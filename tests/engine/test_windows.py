"""KV-cache groups on the host: blocks behind a window go, hits need what the next token sees, in every group."""

from __future__ import annotations

import pytest

from jaxpage.engine.kv_cache import KVCache
from jaxpage.kv_groups import most_blocks
from jaxpage.plan import NULL_BLOCK
from tests.engine.harness import assert_expected, finish, make_engine, run
from tests.fakes import make_beam_request, make_request

PROMPT = [i % 7 for i in range(40)]


def peak_blocks(engine) -> list[int]:
    """Blocks in use after each plan."""
    used, schedule = [], engine.scheduler.schedule

    def watched():
        plan = schedule()
        used.append(engine.scheduler.kv.pool.num_used)
        return plan

    engine.scheduler.schedule = watched
    return used


def test_a_sequence_keeps_what_its_window_sees():
    engine = make_engine(windows=(6,), block_size=4, max_num_batched_tokens=8)
    used = peak_blocks(engine)
    request = make_request("a", PROMPT, max_tokens=20, ignore_eos=True)
    run(engine, request)
    assert_expected(engine, request)
    assert max(used) <= most_blocks((6,), 60, 4, max_query_len=8) == 5
    assert used[-1] <= 3  # 6 tokens lie in at most 3 blocks, 60 in 15


def test_gemma_3_at_32_k_keeps_the_windows_of_its_local_layers():
    windows, length = (1024,) * 5 + (None,), 32_000
    most = most_blocks(windows, length + 3, block_size=16, max_query_len=2048)
    engine = make_engine(
        windows=windows,
        num_blocks=most + 1,
        block_size=16,
        max_num_batched_tokens=2048,
        max_model_len=32_768,
    )
    used = peak_blocks(engine)
    request = make_request("a", [i % 11 for i in range(length)], max_tokens=3, ignore_eos=True)
    run(engine, request)
    assert_expected(engine, request)
    assert engine.stats().num_preemptions == 0
    assert max(used) <= most == 2001 + 5 * 193
    # Once the prompt is done: all blocks of one group, a window of 65 of the five others, which hold 12 000 without.
    assert used[-1] == 2001 + 5 * 65


def test_a_request_that_fits_alone_never_needs_more_than_was_promised():
    for max_tokens in (1, 3, 8, 100):
        windows = (5, 9, None)
        most = most_blocks(windows, 59, 4, max_query_len=max_tokens)
        options = {"block_size": 4, "max_num_batched_tokens": max_tokens, "windows": windows}
        request = make_request("a", PROMPT, max_tokens=20, ignore_eos=True)
        with pytest.raises(ValueError, match=f"needs {most} blocks"):
            make_engine(num_blocks=most, **options).add(request)
        engine = make_engine(num_blocks=most + 1, **options)
        run(engine, request)
        assert_expected(engine, request)
        assert engine.stats().num_preemptions == 0


def cached(windows, tokens, *, lost=()):
    """A pool whose cache has all full blocks of PROMPT in all groups but those `lost`: (group, index). And a lookup."""
    kv = KVCache(100, 4, enable_prefix_caching=True, windows=windows)
    pool = kv.pool
    engine = make_engine()
    engine.add(make_request("old", PROMPT))
    (old,) = engine.scheduler.waiting
    old.block_tables = [pool.allocate(10) for _ in windows]
    kv.register(old, 40)
    for group, index in lost:
        pool.unregister(old.block_tables[group][index])
    engine.add(make_request("new", tokens))
    tables = kv.find(engine.scheduler.waiting[-1]).tables
    for group, table in enumerate(tables):
        assert all(b in (NULL_BLOCK, old.block_tables[group][i]) for i, b in enumerate(table))
    return [[block_id != NULL_BLOCK for block_id in table] for table in tables]


def test_a_hit_holds_only_what_the_next_token_sees():
    hit = [False] * 7 + [True] * 2  # token 36 sees 30 to 35, in blocks 7 and 8
    assert cached((7,), PROMPT) == [hit]
    assert cached((6,), PROMPT) == [hit]  # token 36 sees 31 to 35
    assert cached((5,), PROMPT) == [[False] * 8 + [True]]
    assert cached((7, None), PROMPT) == [hit, [True] * 9]
    assert cached((1,), PROMPT) == [[False] * 9]


def test_blocks_that_nobody_sees_may_be_missing():
    assert cached((7, None), PROMPT, lost=[(0, i) for i in range(7)])[0] == [False] * 7 + [True] * 2


def test_groups_agree_on_one_length():
    assert [len(table) for table in cached((7, None), PROMPT, lost=[(0, 8)])] == [8, 8]
    assert [len(table) for table in cached((7, None), PROMPT, lost=[(0, 7)])] == [7, 7]
    assert [len(table) for table in cached((7, None), PROMPT, lost=[(1, 3)])] == [3, 3]
    # Of the window's group block 2 is lost too: nothing that ends at 3 or 4 has its window.
    assert [len(table) for table in cached((7, None), PROMPT, lost=[(1, 4), (0, 2)])] == [2, 2]
    assert cached((7, 5, None), PROMPT, lost=[(2, 0)]) == [[], [], []]
    # At 9 the first group misses block 8, at 8 the second misses 7, at 7 both have what they need.
    assert [len(t) for t in cached((7, 5, None), PROMPT, lost=[(0, 8), (1, 7)])] == [7, 7, 7]


@pytest.mark.parametrize("windows", [(6,), (5, None), (9, 3)])
def test_hits_of_groups_change_no_token(windows):
    engine = make_engine(windows=windows, max_num_batched_tokens=16)
    first = make_request("first", PROMPT, max_tokens=10)
    run(engine, first)
    again = make_request("again", PROMPT + [3], max_tokens=10)
    run(engine, again)
    assert again.num_cached_tokens == 40
    assert_expected(engine, first, again)


def test_beams_that_come_back_find_what_they_need_behind_the_window():
    engine = make_engine(windows=(3, None), num_blocks=60, block_size=2, max_num_batched_tokens=4)
    request = make_beam_request("beams", PROMPT[:9], width=3, max_tokens=12)
    engine.add(request)
    for _ in range(9):
        engine.step()
    engine.scheduler.preempt_all()
    finish(engine)
    assert request.beams.done


def test_a_prompt_that_is_swapped_out_halfway_comes_back():
    """The other request takes its blocks right after a chunk, when it holds more than a window sees."""
    engine = make_engine(
        windows=(16, None),
        block_size=1,
        num_blocks=213,  # 14 more than the long prompt needs alone
        max_num_batched_tokens=32,
        max_model_len=200,
        num_host_blocks=400,
        preemption_mode="swap",
        enable_prefix_caching=False,
    )
    short = make_request("short", PROMPT[:5], max_tokens=30, ignore_eos=True)
    long = make_request("long", [i % 7 for i in range(150)], max_tokens=2, ignore_eos=True)
    engine.add(short)
    engine.step()
    engine.add(long)
    finish(engine)
    assert_expected(engine, short, long)
    assert engine.stats().num_preemptions > 0 and engine.stats().num_blocks_swapped_in > 0


def test_siblings_of_unequal_length_come_back_from_the_host():
    """The longer one, which comes first, has left blocks behind that the shorter one still sees."""
    windows = (4, None)
    kv = KVCache(
        60,
        2,
        enable_prefix_caching=True,
        windows=windows,
        num_host_blocks=40,
        preemption_mode="swap",
    )
    pool = kv.pool
    engine = make_engine()
    engine.add(make_request("long", PROMPT[:13]))
    engine.add(make_request("short", PROMPT[:8] + [9]))
    long, short = engine.scheduler.waiting
    shared = [pool.allocate(4) for _ in windows]
    for sequence, computed, num_more in ((long, 12, 2), (short, 8, 0)):
        sequence.block_tables = [[*table, *pool.allocate(num_more)] for table in shared]
        sequence.num_computed_tokens = computed
    for table in shared:
        pool.fork(table)
    for sequence in (long, short):
        assert kv.swap_out(sequence)
    kv.take_transfers()
    kv.begin_plan()
    for sequence in (long, short):
        assert kv.admit(sequence, kv.find(sequence), 8)
        kv.register(sequence, sequence.num_computed_tokens)
    assert long.block_tables[1][:4] == short.block_tables[1][:4]
    assert [len(set(table)) for table in short.block_tables] == [3 + 1, 5]
