"""Blocks in host memory, for the KV of swapped-out sequences and as the second tier of the prefix cache, which keeps
what the device evicts. A store on disk can be the third tier.

Knows host blocks as numbers, and which content goes where. Must not know the bytes (the runner does), or which
sequences are preempted and resumed (the scheduler does).

The runner executes transfers when their plan is launched, before its rows run and after all earlier steps. A host block
in a transfer is held until that plan has been launched, so that it does not get other content in the meantime.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxpage.engine.block_pool import BlockPool
from jaxpage.plan import NULL_BLOCK, BlockTransfers
from jaxpage.request import Sequence


class BlockStore(Protocol):
    """Block contents by hash, which outlive the process."""

    def load(self, block_hash: bytes) -> Any | None:
        """The verified content; None if it is absent or damaged. Never raises."""
        ...


class HostTier:
    """`num_blocks` host blocks and the transfers planned for them."""

    def __init__(
        self,
        num_blocks: int,
        pool: BlockPool,
        *,
        preemption_mode: str | None = None,
        store: BlockStore | None = None,
    ):
        """`pool` is the device's pool, which records its evictions from now on. Raises ValueError for 0 blocks."""
        self.device = pool
        self.pool = BlockPool(
            num_blocks + 1, pool.block_size, enable_prefix_caching=pool.enable_prefix_caching
        )
        self.preemption_mode = preemption_mode  # "recompute", "swap", or None: see `should_swap`
        self.store = store
        self.num_swapped_out = self.num_swapped_in = self.num_loaded = 0  # blocks
        self.num_hits = 0  # blocks found here by the prefix cache
        pool.evicted = []
        self.pool.evicted = []
        self._transfers = BlockTransfers()
        self._held: list[int] = []  # host blocks in `_transfers`
        # Host blocks to hold until the next plan begins: in the transfers that were taken last, or just found.
        self._launched: list[int] = []
        self._departed: dict[int, int] = {}  # device block -> its host copy, within a plan
        self._arrived: dict[int, int] = {}  # host block -> its device copy, within a plan

    def begin_plan(self) -> None:
        """Start a new plan: later moves run after all moves of the last plan."""
        self.pool.free(self._launched)
        self._launched = []
        self._departed, self._arrived = {}, {}

    def take_transfers(self) -> BlockTransfers | None:
        """The transfers that must run before the rows of the plan; None if there are none."""
        self._save_evicted()
        transfers, self._transfers = self._transfers, BlockTransfers()
        self._launched += self._held
        self._held = []
        return transfers if transfers else None

    def find(self, block_hash: bytes) -> int | None:
        """The host block with that content, if any, possibly loaded from the store; it is held for `swap_in`."""
        host_id = self.pool.lookup(block_hash)
        if host_id is not None:
            self.pool.touch([host_id])
            # Not `_held`: while there is nothing to launch, every plan finds it again.
            self._launched.append(host_id)
            return host_id
        if self.store is None or not self.pool.num_free:
            return None
        content = self.store.load(block_hash)
        if content is None:
            return None
        host_id = self._new_block()
        self._transfers.loads.append((host_id, content))
        self.pool.register(host_id, block_hash)
        self.num_loaded += 1
        return host_id

    def swap_in(self, host_id: int, *, share: bool = False) -> int:
        """Copy a host block to a device block, and return that block with one reference.

        With `share`, sequences swapped in by the same plan share the device block of a host block that they share.
        """
        if share and host_id in self._arrived:
            device_id = self._arrived[host_id]
            self.device.fork([device_id])
            return device_id
        (device_id,) = self.device.allocate(1)
        self._transfers.swaps_in.append((host_id, device_id))
        self.num_swapped_in += 1
        self.pool.touch([host_id])
        self._held.append(host_id)
        self._arrived[host_id] = device_id
        return device_id

    def should_swap(self, victim: Sequence) -> bool:
        """Whether to swap out a preempted sequence. By default only one with live siblings, as in vLLM V0.

        Beams are never swapped: they are resumed through the first one.
        """
        if victim.num_computed_tokens == 0 or victim.request.beams is not None:
            return False
        if self.preemption_mode is None:
            return sum(not s.finished for s in victim.request.sequences) > 1
        return self.preemption_mode == "swap"

    def swap_out(self, tables: list[list[int]]) -> list[list[int]]:
        """Copy device blocks to host blocks, and return tables of these, with one reference each.

        NULL_BLOCK stays NULL_BLOCK. Returns [] if too few host blocks are free. Sequences preempted in the same plan
        share host blocks as they shared device blocks.
        """
        kept = {NULL_BLOCK, *self._departed}
        missing = sum(block_id not in kept for table in tables for block_id in table)
        if missing > self.pool.num_free:
            return []
        return [[self._swap_out(block_id) for block_id in table] for table in tables]

    def _swap_out(self, block_id: int) -> int:
        if block_id == NULL_BLOCK:
            return NULL_BLOCK
        if block_id in self._departed:
            host_id = self._departed[block_id]
            self.pool.fork([host_id])
            return host_id
        (host_id,) = self.pool.allocate(1)
        self._departed[block_id] = host_id
        self._transfers.swaps_out.append((block_id, host_id))
        self.num_swapped_out += 1
        return host_id

    def release(self, tables: list[list[int]]) -> None:
        """Free the host blocks of a sequence that is on the device again, or has ended."""
        self._held += [host_id for table in tables for host_id in table if host_id != NULL_BLOCK]

    def invalidate(self) -> None:
        """After a failed step, contents may be wrong or missing: forget all hashes and planned transfers."""
        self._transfers = BlockTransfers()
        self.forget_cached()
        self._departed, self._arrived = {}, {}

    def forget_cached(self) -> None:
        """Forget all hashes. Sequences keep their host blocks."""
        self.pool.forget_all()
        self.pool.evicted, self.device.evicted = [], []

    def _save_evicted(self) -> None:
        """Move blocks that the device evicted in this plan here, and blocks that these evict in turn to disk.

        The last blocks of a sequence are evicted first and are worth least, so they are saved last.
        """
        evicted, self.device.evicted = self.device.evicted or [], []
        for block_id, block_hash, parent in reversed(evicted):
            pools = (self.device, self.pool)
            is_known = any(pool.lookup(block_hash) is not None for pool in pools)
            if is_known or not self.pool.num_free:
                continue
            host_id = self._new_block()
            self._transfers.swaps_out.append((block_id, host_id))
            self.pool.register(host_id, block_hash, parent)
            self.num_swapped_out += 1
        pushed_out, self.pool.evicted = self.pool.evicted or [], []
        if self.store is not None:
            self._transfers.stores += [
                (host_id, block_hash) for host_id, block_hash, _ in pushed_out
            ]

    def _new_block(self) -> int:
        """Allocate a host block as the target of a transfer, and hold it until that is done."""
        (host_id,) = self.pool.allocate(1)
        self._held.append(host_id)
        return host_id
