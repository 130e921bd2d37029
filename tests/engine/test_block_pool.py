"""The pool's promises: who owns a block, what is found again, what is evicted first."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpage.engine.block_hashes import hash_block, root_hash
from jaxpage.engine.block_pool import BlockPool
from jaxpage.plan import NULL_BLOCK


def make_pool(num_blocks: int = 6, **options) -> BlockPool:
    return BlockPool(num_blocks, 4, **({"enable_prefix_caching": True} | options))


def make_hashes(count: int, name: bytes = b"") -> list[bytes]:
    return [name + bytes([i]) for i in range(count)]


def test_null_block_is_never_allocated():
    pool = make_pool()
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0 and not pool.eviction_order()


def test_failed_allocation_changes_nothing():
    pool = make_pool()
    held = pool.allocate(3)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 of 5 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.free(held)
    assert pool.num_free == 5 and not any(pool.refs)


def test_shared_block_is_free_after_its_last_owner():
    pool = make_pool()
    ids = pool.allocate(2)
    pool.fork(ids)
    assert pool.is_shared(ids[0])
    pool.free(ids)
    assert not pool.is_shared(ids[0]) and ids[0] not in pool.eviction_order()
    pool.free(ids)
    assert set(ids) <= set(pool.eviction_order())


def test_block_freed_twice_is_noticed():
    pool = make_pool()
    ids = pool.allocate(1)
    pool.free(ids)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(ids)


def test_freed_blocks_are_found_until_they_are_handed_out_again():
    pool = make_pool()
    ids, hashes = pool.allocate(3), make_hashes(3)
    for block_id, block_hash in zip(ids, hashes, strict=True):
        pool.register(block_id, block_hash)
    pool.free(ids)
    assert [pool.lookup(block_hash) for block_hash in hashes] == ids
    pool.touch(ids[:2])
    assert pool.num_free == 3
    pool.allocate(3)
    assert [pool.lookup(block_hash) for block_hash in hashes] == [*ids[:2], None]
    assert pool.num_evictions == 1


def test_tail_is_evicted_first_and_oldest_sequence_before_newer():
    pool = make_pool(num_blocks=7)
    old, new = pool.allocate(3), pool.allocate(3)
    for name, ids in ((b"old", old), (b"new", new)):
        for block_id, block_hash in zip(ids, make_hashes(3, name), strict=True):
            pool.register(block_id, block_hash)
    pool.free(old)
    pool.free(new)
    assert pool.allocate(6) == old[::-1] + new[::-1]


def test_blocks_without_hash_are_reused_before_cached_ones():
    pool = make_pool()
    cached = pool.allocate(2)
    for block_id, block_hash in zip(cached, make_hashes(2), strict=True):
        pool.register(block_id, block_hash)
    plain = pool.allocate(3)
    pool.free(cached)
    pool.free(plain)
    assert set(pool.allocate(3)) == set(plain)
    assert [pool.lookup(block_hash) for block_hash in make_hashes(2)] == cached


def test_blocks_of_equal_content_are_kept_apart():
    pool = make_pool()
    first, second = pool.allocate(2)
    for block_id in (first, second):
        pool.register(block_id, b"same")
    pool.free([first])
    assert pool.num_free == 4 and pool.lookup(b"same") == first
    pool.allocate(4)  # the first among them
    assert pool.lookup(b"same") == second


def test_reset_succeeds_only_when_no_block_is_in_use():
    pool = make_pool()
    ids = pool.allocate(1)
    pool.register(ids[0], b"hash")
    assert not pool.reset_prefix_cache()
    assert pool.lookup(b"hash") == ids[0]
    pool.free(ids)
    assert pool.reset_prefix_cache()
    assert pool.lookup(b"hash") is None


def test_nothing_is_found_when_caching_is_off():
    pool = make_pool(enable_prefix_caching=False)
    pool.register(pool.allocate(1)[0], b"hash")
    assert pool.lookup(b"hash") is None


@pytest.mark.parametrize("sizes", [(1, 4), (0, 4), (4, 0)])
def test_pool_without_room_is_refused(sizes):
    with pytest.raises(ValueError, match="null block"):
        BlockPool(*sizes, enable_prefix_caching=True)


def chain(tokens: list[int], *, salt: str | None = None, epoch: int = 0) -> list[bytes]:
    hashes = [root_hash(epoch)]
    for i in range(0, len(tokens), 4):
        extra = (salt,) if salt is not None and i == 0 else ()
        hashes.append(hash_block(hashes[-1], tokens[i : i + 4], extra))
    return hashes[1:]


def test_hash_changes_with_any_token_up_to_the_blocks_end():
    tokens = list(range(12))
    for changed in range(12):
        other = [*tokens]
        other[changed] += 100
        same = [a == b for a, b in zip(chain(tokens), chain(other), strict=True)]
        assert same == [block < changed // 4 for block in range(3)]


def test_salt_and_weight_epoch_separate_every_block():
    tokens = list(range(8))
    chains = [chain(tokens), chain(tokens, salt="a"), chain(tokens, salt="b")]
    chains += [chain(tokens, epoch=1), chain(tokens, salt="")]
    assert len({h for hashes in chains for h in hashes}) == 10


def test_hashes_are_equal_in_every_process():
    script = (
        "from jaxpage.engine.block_hashes import hash_block, root_hash\n"
        "print(hash_block(root_hash(2), [1, 2, 3, 70000], ('salt',)).hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == hash_block(root_hash(2), [1, 2, 3, 70000], ("salt",)).hex()


class PoolMachine(RuleBasedStateMachine):
    """Random owners of random blocks against a model that knows only lists."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int):
        self.pool = make_pool(num_blocks)
        self.owners: list[list[int]] = []
        self.hash_of: dict[int, bytes] = {}  # what each block may still be found under
        self.num_hashes = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int):
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="are free"):
                self.pool.allocate(count)
            return
        ids = self.pool.allocate(count)
        assert len(set(ids)) == count and NULL_BLOCK not in ids
        assert not set(ids) & {b for owner in self.owners for b in owner}
        for block_id in ids:
            self.hash_of.pop(block_id, None)
        self.owners.append(ids)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def register(self, data):
        owner = data.draw(st.sampled_from(self.owners))
        for block_id in owner:
            if block_id not in self.hash_of:
                # Some contents occur twice.
                self.hash_of[block_id] = b"%d" % data.draw(st.integers(0, 6))
                self.pool.register(block_id, self.hash_of[block_id])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fork(self, data):
        owner = data.draw(st.sampled_from(self.owners))
        self.pool.fork(owner)
        self.owners.append([*owner])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data):
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.free(owner)

    @rule(wanted=st.lists(st.integers(0, 6), max_size=4, unique=True))
    def find_and_touch(self, wanted: list[int]):
        found = {h: self.pool.lookup(h) for h in (b"%d" % i for i in wanted)}
        hits = [block_id for block_id in found.values() if block_id is not None]
        known = set(self.hash_of.values())
        assert all(self.hash_of[b] == h if h in known else b is None for h, b in found.items())
        self.pool.touch(hits)
        self.owners.append(hits)

    @rule()
    def reset(self):
        in_use = any(self.owners)
        assert self.pool.reset_prefix_cache() is not in_use
        if not in_use:
            self.hash_of.clear()

    @invariant()
    def every_block_is_free_or_owned(self):
        if not hasattr(self, "pool"):
            return
        held = Counter(b for owner in self.owners for b in owner)
        blocks = range(self.pool.num_blocks)
        assert self.pool.refs == [held[b] for b in blocks]
        assert sorted(self.pool.eviction_order()) == [b for b in blocks[1:] if not held[b]]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestPoolMachineInDepth(PoolMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.deep
class TestPoolMachineInAllDepth(PoolMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=80, deadline=None)
