"""What is cached of a waiting sequence, and the longest usable prefix of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from jaxpage.engine.block_hashes import group_key
from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.state_cache import StateCache
from jaxpage.kv_groups import Windows, first_seen_block
from jaxpage.plan import NULL_BLOCK
from jaxpage.request import Sequence


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block whose content is in host memory."""

    block_id: int


@dataclass(frozen=True, slots=True, eq=False)
class FoundKV:
    """The KV of a sequence's first `num_tokens` tokens, as blocks.

    `tables` has one table for each KV-cache group, all of the same length: ids of device blocks, host blocks, and
    NULL_BLOCK where the block is behind the group's window.
    """

    num_tokens: int
    tables: list[list[int | HostBlock]]
    # Of models with a recurrent state, see `state_cache`: the slot of the state after these tokens, and after how many
    # tokens to keep the sequence's state. 0: it begins with zeros.
    state_slot: int = 0
    state_borders: tuple[int, ...] = ()

    def num_taken(self, refs: list[int], lengths: list[int]) -> int:
        """Free blocks that tables of these lengths would take; `refs[i]` sequences hold device block i."""
        fresh = sum(lengths) - sum(map(len, self.tables))
        # Cached blocks that no sequence holds are in the free queue, and using them removes them from it.
        return fresh + sum(
            isinstance(hit, HostBlock) or (hit != NULL_BLOCK and refs[hit] == 0)
            for table in self.tables
            for hit in table
        )


def cached_kv(
    hashes: list[bytes],
    lookup: Callable[[bytes], int | HostBlock],
    windows: Windows,
    block_size: int,
    states: StateCache | None = None,
) -> FoundKV:
    """The longest usable prefix of blocks with these hashes, which `lookup` finds by their keys; with `states`, the
    longest one whose state is cached too.
    """

    @cache
    def find(group: int, index: int) -> int | HostBlock:
        return lookup(group_key(hashes[index], group))

    def usable(count: int) -> int:
        return longest_prefix(find, count, windows, block_size)

    length, slot, borders = usable(len(hashes)), 0, ()
    if states is not None:
        length, slot, borders = states.find(hashes, length, lambda count: usable(count) == count)
    tables: list[list[int | HostBlock]] = []
    for group, window in enumerate(windows):
        first = first_seen_block(window, length * block_size, block_size)
        seen = [find(group, index) for index in range(first, length)]
        tables.append([NULL_BLOCK] * first + seen)
    return FoundKV(length * block_size, tables, slot, tuple(block_size * n for n in borders))


def swapped_kv(sequence: Sequence, pool: BlockPool) -> FoundKV:
    """All that a sequence had when it was swapped out. Its first blocks may still be in the prefix cache on the device,
    which is `pool`.
    """
    tables: list[list[int | HostBlock]] = [
        [HostBlock(host_id) if host_id else NULL_BLOCK for host_id in table]
        for table in sequence.host_tables
    ]
    num_full = sequence.num_computed_tokens // pool.block_size
    for index, block_hash in enumerate(sequence.block_hashes[:num_full]):
        found = (
            pool.lookup(group_key(block_hash, group))
            if isinstance(table[index], HostBlock)
            else NULL_BLOCK
            for group, table in enumerate(tables)
        )
        on_device = [block_id for block_id in found if block_id is not None]
        if len(on_device) < len(tables):
            break
        for table, block_id in zip(tables, on_device, strict=True):
            table[index] = block_id
    return FoundKV(sequence.num_computed_tokens, tables)


def num_findable(sequence: Sequence, block_size: int, *, has_windows: bool) -> int:
    """How many of a sequence's first blocks may come from the prefix cache."""
    count = (len(sequence.token_ids) - 1) // block_size
    captures = sequence.request.captures
    if captures is not None:  # tokens whose values are still to be captured must be computed
        missing = captures.within(sequence.num_captured_tokens, count * block_size)
        count = missing[0] // block_size if missing else count
    if sequence.request.beams is not None and has_windows:
        # The other beams start where they differ from the first one, and need the blocks visible from there.
        count = min(count, len(sequence.request.prompt_token_ids) // block_size)
    return count


def longest_prefix(
    is_known: Callable[[int, int], object], count: int, windows: Windows, block_size: int
) -> int:
    """Length in blocks of the longest prefix, up to `count`, whose next token finds all blocks that it can see.

    `is_known(group, index)` says whether a block is cached. Groups without a window are searched from the left up to
    the first miss, the others from the right through one window.
    """
    for group, window in enumerate(windows):
        if window is None:
            count = next((i for i in range(count) if not is_known(group, i)), count)
    while count > 0:
        last_misses = [-1]
        for group, window in enumerate(windows):
            if window is not None:
                seen = range(first_seen_block(window, count * block_size, block_size), count)
                last_misses.append(next((i for i in reversed(seen) if not is_known(group, i)), -1))
        if max(last_misses) < 0:
            break
        count = max(last_misses)
    return count
