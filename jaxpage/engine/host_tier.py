"""Blocks in host memory: preempted sequences wait there with their KV, and what the prefix cache on the device
evicts can still be found there. A store on disk may stand behind it.

What this file knows: host blocks as numbers, and which content goes where. What it must never learn: the bytes (the
runner's), who is preempted and who comes back (the scheduler's).

The runner carries transfers out when the plan that has them is launched, before its rows run; steps that are already
under way have read and written by then. A host block named by a transfer is held until that plan is out, so that no
second content is given to it meanwhile.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxpage.engine.block_pool import BlockPool
from jaxpage.plan import NULL_BLOCK, BlockTransfers
from jaxpage.request import Sequence


class BlockStore(Protocol):
    """What survives the process: contents of blocks by their hash."""

    def load(self, block_hash: bytes) -> Any | None:
        """The content, checked; None if there is none or it is damaged. Never raises."""
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
        """`pool` is the device's; it tells from now on what it evicts. Raises ValueError without a block."""
        self.device = pool
        self.pool = BlockPool(
            num_blocks + 1, pool.block_size, enable_prefix_caching=pool.enable_prefix_caching
        )
        self.preemption_mode = preemption_mode  # "recompute", "swap", or None: see `should_swap`
        self.store = store
        self.num_swapped_out = self.num_swapped_in = self.num_loaded = 0  # blocks
        self.num_hits = 0  # blocks that the prefix cache found here
        pool.evicted = []
        self.pool.evicted = []
        self._transfers = BlockTransfers()
        self._held: list[int] = []  # by `_transfers`
        self._launched: list[int] = []  # held by the transfers that were taken last
        self._departed: dict[int, int] = {}  # device block -> its copy here, within a plan
        self._arrived: dict[int, int] = {}  # host block -> its copy there, within a plan

    def begin_plan(self) -> None:
        """What the last plan moved is done, as far as any later move is concerned."""
        self.pool.free(self._launched)
        self._launched = []
        self._departed, self._arrived = {}, {}

    def take_transfers(self) -> BlockTransfers | None:
        """What has to move before the rows of the plan that is about to be launched; None if nothing has to."""
        self._save_evicted()
        transfers, self._transfers = self._transfers, BlockTransfers()
        self._launched += self._held
        self._held = []
        return transfers if transfers else None

    def find(self, block_hash: bytes) -> list[int]:
        """The host block of that content, if any, perhaps fetched from the store just now; held for `swap_in`."""
        found = self.pool.lookup([block_hash])
        if found:
            self.pool.touch(found)
            self._held += found
            return found
        if self.store is None or not self.pool.num_free:
            return []
        content = self.store.load(block_hash)
        if content is None:
            return []
        host_id = self._new_block()
        self._transfers.loads.append((host_id, content))
        self.pool.register(host_id, block_hash)
        self.num_loaded += 1
        return [host_id]

    def swap_in(self, host_id: int, *, share: bool = False) -> int:
        """A device block, with one reference, into which the content of a host block moves.

        With `share` sequences that come back in one plan have it in common, if they shared it before.
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
        """Whether a preempted sequence keeps its KV here: unless told, as vLLM V0, if it has live siblings.

        Beams do not: they come back by way of the first one.
        """
        if victim.num_computed_tokens == 0 or victim.request.beams is not None:
            return False
        if self.preemption_mode is None:
            return sum(not s.finished for s in victim.request.sequences) > 1
        return self.preemption_mode == "swap"

    def swap_out(self, tables: list[list[int]]) -> list[list[int]]:
        """Tables of host blocks, one reference each, to which the content of device blocks moves.

        NULL_BLOCK stays what it is. [] if too few are free. Sequences that are preempted in one plan share here what
        they shared there.
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
        """A sequence gives its host blocks back: it is on the device again, or has ended."""
        self._held += [host_id for table in tables for host_id in table if host_id != NULL_BLOCK]

    def invalidate(self) -> None:
        """Contents may be wrong or missing, after a failed step. Hashes are forgotten, and planned transfers too."""
        self._transfers = BlockTransfers()
        self.pool.forget_all()
        self.pool.evicted, self.device.evicted = [], []
        self._departed, self._arrived = {}, {}

    def _save_evicted(self) -> None:
        """Blocks that the device's cache lost in this plan find a place here, and what they push out on disk.

        The tail of a sequence was evicted first and is worth least: it comes last here, and is the first to go again.
        """
        evicted, self.device.evicted = self.device.evicted or [], []
        for block_id, block_hash, parent in reversed(evicted):
            known = self.device.lookup([block_hash]) or self.pool.lookup([block_hash])
            if known or not self.pool.num_free:
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
        """A host block for the content that a transfer brings, held until that is done."""
        (host_id,) = self.pool.allocate(1)
        self._held.append(host_id)
        return host_id
