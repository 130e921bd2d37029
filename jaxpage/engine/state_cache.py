"""The prefix cache of recurrent states: which tokens the device has the state after, and where.

A block has the keys and values of its own tokens, so a prefix can be shared up to any of its blocks. A state is of all
tokens so far, and a sequence has only the last one. So when a sequence reaches one of these borders between blocks, its
state is copied to a slot of the prefix cache:

- the last border before its last known token, for prompts that repeat or continue it;
- the end of its blocks in the prefix cache: two prompts have begun the same way, and more may.

Knows hashes of blocks, and slots as numbers. Must not know sequences or the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

# It takes a step of its own to get the state at a border. For fewer tokens, that costs more than it can save.
LEAST_TOKENS = 256


class FoundState(NamedTuple):
    """The state after the first `num_blocks` blocks of a sequence, and the next borders at which to keep its state."""

    num_blocks: int
    slot: int  # of the state; 0 without blocks
    borders: tuple[int, ...]  # in blocks, ascending


class StateCache:
    """States after blocks of tokens, by the hash of the last block. The least recently used one is replaced."""

    def __init__(self, slots: range, block_size: int, *, least_tokens: int = LEAST_TOKENS):
        """slots: of the states, apart from those of running sequences."""
        self.slots, self._free = slots, list(slots)
        self._least = -(-least_tokens // block_size)
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        # Saved by the current plan, after its rows have run; the sequences that it admits begin before.
        self._new: dict[bytes, int] = {}

    def begin_plan(self) -> None:
        """Later plans can use what the last plan saved."""
        self._slots.update(self._new)
        self._new.clear()

    def find(
        self, hashes: Sequence[bytes], num_cached: int, is_usable: Callable[[int], bool]
    ) -> FoundState:
        """The last state among the first `num_cached` blocks of a sequence, whose KV is cached. `hashes`: of all blocks
        that may be cached; `is_usable(n)`: whether windows leave all that is seen after n blocks.
        """
        known = (n for n in range(num_cached, 0, -1) if hashes[n - 1] in self._slots)
        found = next(filter(is_usable, known), 0)
        borders, last = list[int](), found
        for border in (num_cached, len(hashes)):
            if border - last >= self._least:
                borders.append(border)
                last = border
        return FoundState(found, self._slots[hashes[found - 1]] if found else 0, tuple(borders))

    def touch(self, block_hash: bytes) -> None:
        """A sequence begins with the state that `find` found."""
        self._slots.move_to_end(block_hash)

    def save(self, block_hash: bytes) -> int:
        """The slot that takes the state after a block; 0 if there is one, or the current plan has filled all slots."""
        if block_hash in self._slots:  # blocks before it had been evicted, and are computed again
            self._slots.move_to_end(block_hash)
            return 0
        if block_hash in self._new:
            return 0
        if not self._free:
            if not self._slots:
                return 0
            self._free.append(self._slots.popitem(last=False)[1])
        slot = self._new[block_hash] = self._free.pop()
        return slot

    def forget_all(self) -> None:
        """Trust no state any more."""
        self._free += [*self._slots.values(), *self._new.values()]
        self._slots.clear()
        self._new.clear()
