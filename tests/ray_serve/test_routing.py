"""Keys of beginnings, and the rule that chooses a replica. No Ray."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from jaxpage.ray_serve.choice import PrefixMemory, ranked
from jaxpage.ray_serve.prefix import BLOCK_LEN, MAX_BLOCKS, prefix_keys

SYSTEM = {"role": "system", "content": "Answer briefly. " * 40}
QUESTION = {"role": "user", "content": "Why is the sky blue? " * 20}
ANSWER = {"role": "assistant", "content": "Rayleigh. " * 40}


def keys_of(**body) -> tuple[bytes, ...]:
    return prefix_keys(json.dumps(body).encode())


def num_equal(first, second) -> int:
    same = [a == b for a, b in zip(first, second, strict=False)]
    assert same == sorted(same, reverse=True)  # a key depends on all before it
    return sum(same)


def test_a_conversation_that_goes_on_begins_as_before():
    first = keys_of(messages=[SYSTEM, QUESTION])
    second = keys_of(messages=[SYSTEM, QUESTION, ANSWER, QUESTION], temperature=0.5)
    assert 3 <= len(first) < len(second)
    assert num_equal(first, second) >= len(first) - 1  # the last block may have the end of the list


def test_only_what_the_model_is_told_counts():
    text = "Once upon a time " * 40
    assert keys_of(prompt=text, seed=1, model="a") == keys_of(model="b", prompt=text, max_tokens=3)
    assert num_equal(keys_of(prompt=text), keys_of(prompt="x" + text)) == 0
    assert num_equal(keys_of(prompt=text), keys_of(prompt=text, cache_salt="mine")) == 0
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 300}}]
    assert num_equal(keys_of(messages=[SYSTEM]), keys_of(messages=[SYSTEM], tools=tools)) == 0


def test_the_system_prompt_of_a_message_counts_but_not_what_differs_in_every_request():
    system = [{"type": "text", "text": SYSTEM["content"]}]
    billing = [{"type": "text", "text": f"x-anthropic-billing-header: {i}"} for i in range(2)]
    first, second = (keys_of(system=[b, *system], messages=[QUESTION]) for b in billing)
    assert first == second == keys_of(system=system, messages=[QUESTION])
    assert num_equal(first, keys_of(system="x" * 300, messages=[QUESTION])) == 0


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"7", b"\xff", b"[" * 100_000, b'{"prompt": "short"}', b"{}"]
)
def test_other_bodies_have_no_keys(body):
    assert prefix_keys(body) == ()


def test_what_is_looked_at_is_bounded():
    assert len(keys_of(prompt="a" * BLOCK_LEN * (MAX_BLOCKS + 9))) == MAX_BLOCKS
    assert len(keys_of(token_ids=list(range(1000)))) > 10
    assert keys_of(prompt="\ud800" * BLOCK_LEN)  # a lone surrogate is escaped


A, B, C = "a", "b", "c"
ONE, TWO, THREE = b"1", b"2", b"3"


def test_the_longest_beginning_wins():
    memory = PrefixMemory()
    memory.note([ONE], A, [A, B])
    memory.note([ONE, TWO], B, [A, B])
    assert memory.num_seen([ONE, TWO, THREE], [A, B, C]) == {A: 1, B: 2, C: 0}
    assert ranked([ONE, TWO, THREE], {A: 0, B: 5, C: 0}, memory) == [B, A, C]
    assert ranked([ONE], {A: 3, B: 1, C: 0}, memory) == [B, A, C]  # both know it: the shorter queue


def test_a_queue_that_is_clearly_longer_is_left_alone():
    memory = PrefixMemory()
    memory.note([ONE], A, [A, B])
    assert ranked([ONE], {A: 8, B: 0}, memory) == [A, B]
    assert ranked([ONE], {A: 9, B: 0}, memory) == [B, A]
    assert ranked([ONE], {A: 158, B: 100}, memory) == [A, B]
    assert ranked([ONE], {A: 159, B: 100}, memory) == [B, A]


def test_what_nobody_knows_goes_to_the_shortest_queue():
    assert ranked([ONE], {A: 2, B: 1, C: 3}, PrefixMemory()) == [B, A, C]
    assert ranked([], {A: 2, B: 1}, PrefixMemory()) == [B, A]
    assert ranked([ONE], {}, PrefixMemory()) == []


def test_routers_that_know_nothing_agree_and_share_the_work():
    first = Counter(ranked([bytes([n])], {A: 0, B: 0}, PrefixMemory())[0] for n in range(200))
    again = Counter(ranked([bytes([n])], {B: 0, A: 0}, PrefixMemory())[0] for n in range(200))
    assert first == again
    assert min(first[A], first[B]) > 60


def test_the_memory_is_bounded_and_forgets_replicas():
    memory = PrefixMemory(capacity=2)
    for key in (ONE, TWO):
        memory.note([key], A, [A])
    memory.note([ONE], A, [A])
    memory.note([THREE], B, [A, B])
    assert len(memory) == 2
    assert memory.num_seen([TWO], [A, B]) == {A: 0, B: 0}
    memory.note([ONE], B, [B])  # A is gone
    assert memory.num_seen([ONE], [A, B]) == {A: 0, B: 1}
