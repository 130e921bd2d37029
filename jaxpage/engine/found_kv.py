"""The cached KV found for a waiting sequence, and the longest usable prefix of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

    def num_taken(self, refs: list[int], lengths: list[int]) -> int:
        """Free blocks that tables of these lengths would take; `refs[i]` sequences hold device block i."""
        fresh = sum(lengths) - sum(map(len, self.tables))
        # Cached blocks that no sequence holds are in the free queue, and using them removes them from it.
        return fresh + sum(
            isinstance(hit, HostBlock) or (hit != NULL_BLOCK and refs[hit] == 0)
            for table in self.tables
            for hit in table
        )


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
