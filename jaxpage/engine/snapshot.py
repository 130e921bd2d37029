"""The KV pool at one moment as plain arrays: owners of blocks, their hashes, and the order of eviction.

Knows how to read the scheduler, its pool and the host tier. Must not change them. `jaxpage.plots` draws the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpage.plan import NULL_BLOCK

if TYPE_CHECKING:
    from jaxpage.engine.scheduler import Scheduler

DEVICE, HOST = 0, 1  # tiers


@dataclass(frozen=True, kw_only=True)
class KVSnapshot:
    """N blocks, R sequences that hold blocks, M blocks in the longest of their tables.

    Arrays over blocks are indexed by block id; the host's blocks follow the device's. The first block of a tier is its
    null block, which no sequence holds. A slot is used if it holds the KV of a token whose id the host knows: tokens of
    a step in flight count once it is collected.
    """

    num_steps: int  # planned since start
    block_size: int
    # R times (request id, which of its n continuations); running ones first
    sequences: tuple[tuple[str, int], ...]
    # int32[R, M] block ids, one KV-cache group's after another; NULL_BLOCK: behind a group's window, or padding
    block_tables: np.ndarray
    tiers: np.ndarray  # int8[N] DEVICE or HOST
    # int32[N] the first sequence that holds the block, an index into `sequences`; -1: none
    owners: np.ndarray
    # int32[N] how many sequences hold it; on the host, a block in transfer counts as held too
    references: np.ndarray
    used_slots: np.ndarray  # int32[N] of block_size, 0 for blocks that no sequence holds
    # int32[N] position in its tier's queue of free blocks, 0 is evicted first; -1: not in the queue
    eviction_order: np.ndarray
    # uint64[N] first 8 bytes of the hash of a block in the prefix cache; 0: not in the cache
    hashes: np.ndarray
    # uint64[N] the same of the block before it; 0: first block of a sequence, or not in the cache
    parents: np.ndarray
    hits: np.ndarray  # int32[N] how often the block was found since it entered the cache

    @property
    def num_blocks_used(self) -> int:
        """On the device."""
        return int(np.count_nonzero(self._held))

    @property
    def num_allocated_slots(self) -> int:
        """On the device."""
        return self.num_blocks_used * self.block_size

    @property
    def unused_slots(self) -> dict[str, int]:
        """Allocated slots of the device without KV, by cause.

        "partial": the rest of a partly filled block. "ahead": whole blocks for later tokens, of a prompt that is
        computed in chunks or of the later decode steps of a launch.
        """
        begun = self._held & (self.used_slots > 0)
        return {
            "partial": int(np.sum(self.block_size - self.used_slots, where=begun)),
            "ahead": int(np.count_nonzero(self._held & ~begun)) * self.block_size,
        }

    @property
    def _held(self) -> np.ndarray:
        return (self.references > 0) & (self.tiers == DEVICE)


def take_snapshot(scheduler: Scheduler) -> KVSnapshot:
    """The current contents of scheduler, pool and host tier. For inspection, not serving: it visits every block."""
    kv = scheduler.kv
    first_host_id = kv.pool.num_blocks
    pools = [kv.pool] if kv.tier is None else [kv.pool, kv.tier.pool]
    holders = [(sequence, sequence.block_tables) for sequence in scheduler.running]
    for sequence in scheduler.waiting:  # those that were swapped out
        if sequence.host_tables:
            tables = [[h and first_host_id + h for h in table] for table in sequence.host_tables]
            holders.append((sequence, tables))
    num_blocks, size = sum(pool.num_blocks for pool in pools), kv.block_size
    longest = max((sum(map(len, tables)) for _, tables in holders), default=0)
    block_tables = np.full((len(holders), longest), NULL_BLOCK, np.int32)
    owners = np.full(num_blocks, -1, np.int32)
    used_slots = np.zeros(num_blocks, np.int32)
    for row, (sequence, tables) in reversed(list(enumerate(holders))):  # the first owner stays
        ids = np.concatenate([np.array(table, np.int32) for table in tables])
        block_tables[row, : len(ids)] = ids
        owners[ids] = row
        # `num_computed_tokens` counts launched steps as done, but the host does not know their tokens yet.
        num_used = min(sequence.num_computed_tokens, len(sequence.token_ids))
        index = np.concatenate([np.arange(len(table)) for table in tables])
        used_slots[ids] = np.maximum(used_slots[ids], np.clip(num_used - size * index, 0, size))
    owners[NULL_BLOCK], used_slots[NULL_BLOCK] = -1, 0
    orders = [np.full(pool.num_blocks, -1, np.int32) for pool in pools]
    for pool, order in zip(pools, orders, strict=True):
        order[pool.eviction_order()] = np.arange(pool.num_free)
    hashes = _first_bytes([block_hash for pool in pools for block_hash in pool.hashes])
    parents = _first_bytes([parent for pool in pools for parent in pool.parents])
    hits = np.array([count for pool in pools for count in pool.hits], np.int32)
    return KVSnapshot(
        num_steps=scheduler.counters.num_steps,
        block_size=size,
        sequences=tuple((s.request.request_id, s.index) for s, _ in holders),
        block_tables=block_tables,
        tiers=np.repeat(
            np.array([DEVICE, HOST], np.int8)[: len(pools)], [p.num_blocks for p in pools]
        ),
        owners=owners,
        references=np.array([count for pool in pools for count in pool.refs], np.int32),
        used_slots=used_slots,
        eviction_order=np.concatenate(orders),
        hashes=hashes,
        parents=np.where(hashes > 0, parents, np.uint64(0)),
        hits=np.where(hashes > 0, hits, np.int32(0)),
    )


def of_replica(replica: int, found: Mapping[int, KVSnapshot]) -> KVSnapshot:
    """The snapshot of one replica. Raises ValueError if there is none."""
    if replica not in found:
        raise ValueError(f"there is no replica {replica!r}, or it has failed")
    return found[replica]


def _first_bytes(hashes: list[bytes | None]) -> np.ndarray:
    """uint64[N]: the first 8 bytes of each hash, which are enough to tell blocks apart."""
    return np.frombuffer(b"".join(h[:8] if h else bytes(8) for h in hashes), np.uint64).copy()
