"""Which of a sequence's blocks can be found by their content, and finding them.

What this file knows: how a sequence's tokens become the hashes of its blocks. What it must never
learn: when blocks are allocated or freed (the scheduler's), how they are kept (the pool's).
"""

from __future__ import annotations

import sys

from jaxpage.engine.block_pool import BlockPool, hash_block, root_hash
from jaxpage.engine.host_tier import HostTier
from jaxpage.request import Sequence

NEVER = sys.maxsize  # as `num_registered_blocks`: blocks of this sequence do not enter the cache


def find_cached_blocks(
    pool: BlockPool, sequence: Sequence, weight_epoch: int, tier: HostTier | None = None
) -> list[int]:
    """Cached blocks of a waiting sequence, from its start: whole ones, never its last token.

    That one must be computed, so of a prompt of exactly k cached blocks k - 1 are found. Host block
    h stands in the list as -h.
    """
    if not pool.enable_prefix_caching or sequence.request.params.skip_reading_prefix_cache:
        return []
    count = (len(sequence.token_ids) - 1) // pool.block_size
    _extend_hashes(sequence, count, pool.block_size, weight_epoch)
    hits = pool.lookup(sequence.block_hashes[:count])
    if tier is None:
        return hits
    for block_hash in sequence.block_hashes[len(hits) : count]:
        found = pool.lookup([block_hash]) or [-h for h in tier.find(block_hash)]
        if not found:
            break
        hits += found
    return hits


def register_blocks(
    pool: BlockPool, sequence: Sequence, num_tokens: int, weight_epoch: int
) -> None:
    """Make the full blocks of the first `num_tokens` tokens, computed or planned, findable."""
    count = num_tokens // pool.block_size
    if count <= sequence.num_registered_blocks:
        return
    _extend_hashes(sequence, count, pool.block_size, weight_epoch)
    hashes = sequence.block_hashes
    for index in range(sequence.num_registered_blocks, count):
        parent = hashes[index - 1] if index else None
        pool.register(sequence.block_ids[index], hashes[index], parent)
    sequence.num_registered_blocks = count


def _extend_hashes(sequence: Sequence, count: int, block_size: int, weight_epoch: int) -> None:
    """Hash the first `count` blocks. The salt enters the first only: the chain carries it on."""
    hashes, cache_salt = sequence.block_hashes, sequence.request.cache_salt
    for index in range(len(hashes), count):
        parent = hashes[-1] if hashes else root_hash(weight_epoch)
        extra = (cache_salt,) if cache_salt is not None and index == 0 else ()
        tokens = sequence.token_ids[index * block_size : (index + 1) * block_size]
        hashes.append(hash_block(parent, tokens, extra))
