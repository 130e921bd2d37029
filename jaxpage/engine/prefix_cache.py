"""Which of a sequence's blocks can be found by their content, and finding them.

What this file knows: how a sequence's tokens become the hashes of its blocks. What it must never
learn: when blocks are allocated or freed (the scheduler's), how they are kept (the pool's).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

from jaxpage.engine.block_pool import BlockPool, group_key, hash_block, root_hash
from jaxpage.engine.host_tier import HostTier
from jaxpage.kv_groups import Windows, first_seen_block, widest_window
from jaxpage.plan import NULL_BLOCK
from jaxpage.request import Sequence

NEVER = sys.maxsize  # as `num_registered_blocks`: blocks of this sequence do not enter the cache


def find_cached_blocks(
    pool: BlockPool, sequence: Sequence, weight_epoch: int, tier: HostTier | None = None
) -> list[list[int]]:
    """Cached blocks of a waiting sequence, from its start: whole ones, never its last token.

    That one must be computed, so of a prompt of exactly k cached blocks k - 1 are found. A table for
    each group, all equally long. Host block h stands in it as -h, NULL_BLOCK where the block is
    behind the group's window.
    """
    if not pool.enable_prefix_caching or sequence.request.params.skip_reading_prefix_cache:
        return [[] for _ in pool.windows]
    size, windows = pool.block_size, pool.windows
    count = (len(sequence.token_ids) - 1) // size
    if sequence.request.beams is not None and widest_window(windows):
        # The other beams start where they differ from the first, and need what is seen from there.
        count = min(count, len(sequence.request.prompt_token_ids) // size)
    _extend_hashes(sequence, count, size, weight_epoch)
    hashes = sequence.block_hashes

    @cache
    def find(group: int, index: int) -> int:
        key = group_key(hashes[index], group)
        for block_id in pool.lookup([key]):
            return block_id
        for host_id in [] if tier is None else tier.find(key):
            return -host_id
        return NULL_BLOCK

    length = _length_of_hit(find, count, windows, size)
    tables = []
    for group, window in enumerate(windows):
        first = first_seen_block(window, length * size, size)
        seen = [find(group, index) for index in range(first, length)]
        tables.append([NULL_BLOCK] * first + seen)
    return tables


def _length_of_hit(
    find: Callable[[int, int], int], count: int, windows: Windows, block_size: int
) -> int:
    """Blocks of the longest prefix, up to `count`, of which `find` knows what its next token can see, in all groups.

    Groups that see everything are searched from the left, to their first miss, the others from the
    right, through one window.
    """
    for group, window in enumerate(windows):
        if window is None:
            count = next((i for i in range(count) if not find(group, i)), count)
    while count > 0:
        last_misses = [-1]
        for group, window in enumerate(windows):
            if window is not None:
                seen = range(first_seen_block(window, count * block_size, block_size), count)
                last_misses.append(next((i for i in reversed(seen) if not find(group, i)), -1))
        if max(last_misses) < 0:
            break
        count = max(last_misses)
    return count


def register_blocks(
    pool: BlockPool, sequence: Sequence, num_tokens: int, weight_epoch: int
) -> None:
    """Make the full blocks of the first `num_tokens` tokens, computed or planned, findable."""
    count = num_tokens // pool.block_size
    first = sequence.num_registered_blocks
    if count <= first:
        return
    _extend_hashes(sequence, count, pool.block_size, weight_epoch)
    hashes = sequence.block_hashes
    for group, table in enumerate(sequence.block_tables):
        for index in range(first, count):
            block_id = table[index]
            key, parent = hashes[index], hashes[index - 1] if index else None
            if group:  # the first one's key is the hash itself, and calls are dear here
                key, parent = group_key(key, group), parent and group_key(parent, group)
            # A sibling that was swapped in together with this sequence may have registered what they share, while
            # another group of this one had to bring a block that the sibling had left behind.
            if block_id != NULL_BLOCK and pool.hashes[block_id] != key:
                pool.register(block_id, key, parent)
    sequence.num_registered_blocks = count


def _extend_hashes(sequence: Sequence, count: int, block_size: int, weight_epoch: int) -> None:
    """Hash the first `count` blocks. The salt enters the first only: the chain carries it on."""
    hashes, tokens, salt = sequence.block_hashes, sequence.token_ids, sequence.request.cache_salt
    if count > 0 and not hashes:
        extra = () if salt is None else (salt,)
        hashes.append(hash_block(root_hash(weight_epoch), tokens[:block_size], extra))
    for start in range(len(hashes) * block_size, count * block_size, block_size):
        hashes.append(hash_block(hashes[-1], tokens[start : start + block_size]))
