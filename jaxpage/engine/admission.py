"""What a waiting sequence finds of its KV when it is admitted, and how that becomes its first blocks.

What this file knows: one sequence, the device's pool and the host tier. What it must never learn: who is admitted,
slots, budgets (the scheduler's). In the lists here host block h stands as -h.
"""

from __future__ import annotations

from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.host_tier import HostTier
from jaxpage.engine.prefix_cache import NEVER, find_cached_blocks
from jaxpage.request import Sequence


def find_blocks(
    pool: BlockPool, tier: HostTier | None, sequence: Sequence, weight_epoch: int
) -> list[int]:
    """The blocks of its beginning that have their content somewhere: cached ones, or all it had when swapped out."""
    if not sequence.host_block_ids:
        return find_cached_blocks(pool, sequence, weight_epoch, tier)
    num_full = sequence.num_computed_tokens // pool.block_size
    hits = pool.lookup(sequence.block_hashes[:num_full])
    return hits + [-host_id for host_id in sequence.host_block_ids[len(hits) :]]


def take_blocks(
    pool: BlockPool, tier: HostTier | None, sequence: Sequence, hits: list[int]
) -> None:
    """Make what `find_blocks` found the first blocks of a sequence, and say how far it is computed with them.

    Enough blocks must be free for those that come from the host.
    """
    pool.touch([hit for hit in hits if hit > 0])
    if sequence.host_block_ids:
        num_registered = _swap_in(pool, tier, sequence, hits)
    else:
        num_registered = len(hits)
        sequence.block_ids = _bring_cached(pool, tier, sequence, hits)
        sequence.num_computed_tokens = len(hits) * pool.block_size
    sequence.num_registered_blocks = num_registered if pool.enable_prefix_caching else NEVER


def _bring_cached(
    pool: BlockPool, tier: HostTier | None, sequence: Sequence, hits: list[int]
) -> list[int]:
    """Device blocks of hits in the prefix cache; what comes from the host can be found on the device from now on."""
    block_ids, hashes = [], sequence.block_hashes
    for index, hit in enumerate(hits):
        if hit < 0:
            assert tier is not None
            hit = tier.bring(-hit)
            tier.num_hits += 1
            pool.register(hit, hashes[index], hashes[index - 1] if index else None)
        block_ids.append(hit)
    return block_ids


def _swap_in(pool: BlockPool, tier: HostTier | None, sequence: Sequence, hits: list[int]) -> int:
    """Back to the device with the KV it had; returns how many of its blocks are registered.

    Full blocks stay shared among those that come back together. A partial one has one owner: the next token is written
    to it.
    """
    assert tier is not None
    num_full = sequence.num_computed_tokens // pool.block_size
    sequence.block_ids = [
        hit if hit > 0 else tier.bring(-hit, share=index < num_full)
        for index, hit in enumerate(hits)
    ]
    tier.release(sequence.host_block_ids)
    sequence.host_block_ids = []
    if sequence.num_registered_blocks == NEVER:
        return NEVER
    return sum(hit > 0 for hit in hits)  # those come first
