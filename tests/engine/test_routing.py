"""Where requests go: to their prefix, unless that replica has clearly more to do; then to the one with the least."""

from __future__ import annotations

import random

import pytest

from jaxpage.engine.routing import SEQUENCE_LOAD, Router
from tests.fakes import make_beam_request, make_request

ALL = (0, 1, 2)


def make_router(**options) -> Router:
    return Router(3, **({"block_size": 4, "max_blocks": 100} | options))


def prompt(*starts: int, length: int = 4) -> list[int]:
    """A block of equal tokens for each number."""
    return [token for token in starts for _ in range(length)]


def test_equal_replicas_have_their_turns():
    router = make_router()
    chosen = [router.choose(make_request(str(i), [i]), ALL) for i in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_the_longest_prefix_wins():
    router = make_router()
    assert router.choose(make_request("a", prompt(1, 2)), ALL) == 0
    assert router.choose(make_request("b", prompt(1, 3, 4)), (1,)) == 1
    assert router.choose(make_request("c", prompt(1, 2, 5)), ALL) == 0
    assert router.choose(make_request("d", prompt(1, 3, 4, 6)), ALL) == 1
    # Two have the first block: the one with less to do.
    assert router.choose(make_request("e", prompt(1, 7)), ALL) == 0
    assert router.choose(make_request("f", prompt(8)), ALL) == 2


def test_a_block_that_is_not_full_and_one_behind_another_beginning_are_no_prefix():
    router = make_router()
    router.choose(make_request("a", prompt(1, 2)), (1,))
    assert router.choose(make_request("b", [1, 1, 1]), ALL) == 2
    assert router.choose(make_request("c", prompt(3, 2)), ALL) == 0


@pytest.mark.parametrize("other", [{"salt": "s"}, {"skip_reading_prefix_cache": True}])
def test_what_may_not_be_found_does_not_attract(other):
    router = make_router()
    router.choose(make_request("a", prompt(1)), (1,))
    assert router.choose(make_request("b", prompt(1), **other), ALL) != 1


def test_without_a_prefix_cache_only_the_load_counts():
    router = make_router(block_size=0)
    router.choose(make_request("a", prompt(1)), (1,))
    assert router.choose(make_request("b", prompt(1)), ALL) == 2


def test_a_replica_with_clearly_more_to_do_is_left_alone_and_the_prefix_is_at_two_then():
    router = make_router()
    chosen = [router.choose(make_request(str(i), prompt(1, 2)), ALL) for i in range(40)]
    num_first = next(i for i, replica in enumerate(chosen) if replica != chosen[0])
    assert 8 <= num_first <= 10  # sequences more than nothing
    counts = [chosen.count(replica) for replica in ALL]
    assert max(counts) - min(counts) <= 10
    # While nobody has it yet, a new prompt goes where there is least to do.
    least = min(ALL, key=router.load)
    assert router.choose(make_request("new", prompt(5)), ALL) == least


def test_only_those_that_may_are_chosen():
    router = make_router()
    router.choose(make_request("a", prompt(1, 2)), ALL)
    for i in range(12):
        assert router.choose(make_request(str(i), prompt(1, 2)), (2, 1)) in (1, 2)


def test_the_load_is_what_is_left_to_do():
    router = make_router()
    router.choose(make_request("a", [1] * 30, n=2), (0,))
    assert router.load(0) == 2 * SEQUENCE_LOAD + 30
    router.answered("a")
    router.answered("a")
    assert router.load(0) == 2 * SEQUENCE_LOAD
    router.choose(make_beam_request("b", [1] * 10, width=3, max_tokens=4), (0,))
    # Two blocks of it are cached.
    assert router.load(0) == 5 * SEQUENCE_LOAD + 2
    router.ended("b")
    router.ended("a")
    router.ended("a")
    router.answered("b")
    assert [router.load(replica) for replica in ALL] == [0, 0, 0]


def test_what_was_used_last_is_remembered_longest():
    router = make_router(max_blocks=4)
    router.choose(make_request("a", prompt(1, 2)), (0,))
    router.choose(make_request("b", prompt(3, 4)), (1,))
    router.choose(make_request("c", prompt(1, 2)), (0,))
    router.choose(make_request("d", prompt(5)), (2,))
    # Of the second prompt the end is gone, and its beginning is there.
    assert router._longest_prefix(router._prompt_hashes(make_request("x", prompt(3, 4))), ALL) == (
        1,
        [1],
    )
    assert router._longest_prefix(router._prompt_hashes(make_request("y", prompt(1, 2))), ALL) == (
        2,
        [0],
    )
    router.forget_prefixes()
    assert router._longest_prefix(router._prompt_hashes(make_request("y", prompt(1, 2))), ALL) == (
        0,
        [0, 1, 2],
    )


def test_random_work_is_shared_evenly_and_conversations_stay_where_they_are():
    rng, router = random.Random(0), Router(4, block_size=4, max_blocks=10_000)
    chats: dict[int, list[int]] = {i: [100 + i] * 8 for i in range(40)}
    where: dict[int, int] = {}
    num_moved = 0
    for turn in range(400):
        chat = rng.randrange(40)
        chats[chat] += [rng.randrange(50) for _ in range(9)]
        chosen = router.choose(make_request(str(turn), chats[chat]), range(4))
        num_moved += where.setdefault(chat, chosen) != chosen
        where[chat] = chosen
        router.answered(str(turn - 10))
        router.ended(str(turn - 20))
    assert num_moved < 20
    assert len(set(where.values())) == 4
