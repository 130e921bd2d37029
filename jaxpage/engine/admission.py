"""What a waiting sequence finds of its KV when it is admitted, and how that becomes its block tables.

What this file knows: one sequence, the device's pool and the host tier. What it must never learn: who is admitted,
slots, budgets (the scheduler's). Tables of what was found have an entry for each block of the sequence's beginning:
host block h stands there as -h, and NULL_BLOCK where no token to come can see the block.
"""

from __future__ import annotations

from jaxpage.engine.block_pool import BlockPool, group_key
from jaxpage.engine.host_tier import HostTier
from jaxpage.engine.prefix_cache import NEVER, find_cached_blocks
from jaxpage.kv_groups import widest_window
from jaxpage.plan import NULL_BLOCK
from jaxpage.request import Sequence

Tables = list[list[int]]  # one for each KV-cache group


def find_blocks(
    pool: BlockPool, tier: HostTier | None, sequence: Sequence, weight_epoch: int
) -> Tables:
    """The blocks of its beginning that have their content somewhere: cached ones, or all it had when swapped out."""
    if not sequence.host_tables:
        return find_cached_blocks(pool, sequence, weight_epoch, tier)
    tables = [[-host_id for host_id in table] for table in sequence.host_tables]
    num_full = sequence.num_computed_tokens // pool.block_size
    for index, block_hash in enumerate(sequence.block_hashes[:num_full]):
        found = [
            pool.lookup([group_key(block_hash, group)]) if table[index] else [NULL_BLOCK]
            for group, table in enumerate(tables)
        ]
        if not all(found):
            break
        for table, block_ids in zip(tables, found, strict=True):
            table[index] = block_ids[0]
    return tables


def num_computed(pool: BlockPool, sequence: Sequence, found: Tables) -> int:
    """Tokens whose KV is in the blocks that `find_blocks` found."""
    if sequence.host_tables:
        return sequence.num_computed_tokens
    return len(found[0]) * pool.block_size


def table_lengths(pool: BlockPool, known: int, start: int, max_query_len: int) -> list[int]:
    """How many entries the tables of a sequence with `known` tokens, computed up to `start`, get when it is admitted.

    Without a window: all that those tokens need, though the first chunk may need few. A promise without blocks would
    admit two prompts into the room of one, and a preemption would throw away half of a prefill. With windows: as much
    as they may need at once, since `max_query_len` more tokens are computed in a step at most; then blocks are left
    behind as fast as others are gained.
    """
    size, windows = pool.block_size, pool.windows
    whole = -(-known // size)
    ahead = max(start, widest_window(windows) - 1) + max_query_len
    return [whole if w is None else min(whole, -(-ahead // size)) for w in windows]


def num_taken(pool: BlockPool, found: Tables, lengths: list[int]) -> int:
    """Blocks that leave the free queue when `take_blocks` is called."""
    fresh = sum(lengths) - sum(map(len, found))
    # Hits that nobody uses stand in the free queue; using them takes them out of it.
    return fresh + sum(
        hit < 0 or (hit != NULL_BLOCK and pool.refs[hit] == 0) for table in found for hit in table
    )


def take_blocks(
    pool: BlockPool,
    tier: HostTier | None,
    sequence: Sequence,
    found: Tables,
    lengths: list[int],
) -> None:
    """Make what `find_blocks` found the sequence's block tables, of those lengths, and say how far it is computed.

    `num_taken` blocks must be free.
    """
    for table in found:
        pool.touch([hit for hit in table if hit > 0])
    if sequence.host_tables:
        num_registered = _swap_in(pool, tier, sequence, found)
    else:
        num_registered = len(found[0])
        sequence.num_computed_tokens = num_registered * pool.block_size
        sequence.block_tables = _bring_cached(pool, tier, sequence, found)
    for table, length in zip(sequence.block_tables, lengths, strict=True):
        table += pool.allocate(length - len(table))
    sequence.num_unseen_blocks = sum(table.count(NULL_BLOCK) for table in found)
    sequence.num_registered_blocks = num_registered if pool.enable_prefix_caching else NEVER


def _bring_cached(
    pool: BlockPool, tier: HostTier | None, sequence: Sequence, found: Tables
) -> Tables:
    """Device blocks of hits in the prefix cache; what comes from the host can be found on the device from now on."""
    hashes = sequence.block_hashes
    for group, table in enumerate(found):
        for index, hit in enumerate(table):
            if hit < 0:
                assert tier is not None
                table[index] = tier.bring(-hit)
                tier.num_hits += 1
                parent = group_key(hashes[index - 1], group) if index else None
                pool.register(table[index], group_key(hashes[index], group), parent)
    return found


def _swap_in(pool: BlockPool, tier: HostTier | None, sequence: Sequence, found: Tables) -> int:
    """Back to the device with the KV it had; returns how many blocks of a table are registered.

    Full blocks stay shared among those that come back together. A partial one has one owner: the next token is written
    to it.
    """
    assert tier is not None
    num_full = sequence.num_computed_tokens // pool.block_size
    sequence.block_tables = [
        [
            tier.bring(-hit, share=index < num_full) if hit < 0 else hit
            for index, hit in enumerate(table)
        ]
        for table in found
    ]
    tier.release(sequence.host_tables)
    sequence.host_tables = []
    if sequence.num_registered_blocks == NEVER:
        return NEVER
    return min(sum(hit >= 0 for hit in table) for table in found)
