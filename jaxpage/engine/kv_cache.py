"""The KV blocks of all sequences: who holds which, what is found again, what moves to the host and back.

What this file knows: sequences, their blocks on the device and on the host, the plan that tells the device of changes.
What it must never learn: who runs, who waits, who is preempted when blocks are scarce (the scheduler's).

These fields of a sequence belong to it: `block_tables`, `writable_len`, `num_unseen_blocks`, `host_tables`,
`block_hashes`, `num_registered_blocks`, `has_mixed_kv`. It also sets `num_computed_tokens` where KV comes or goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from jaxpage.engine.block_hashes import extend_hashes, group_key
from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.found_kv import FoundKV, HostBlock, longest_prefix, num_findable
from jaxpage.engine.host_tier import BlockStore, HostTier
from jaxpage.kv_groups import Windows, first_seen_block, widest_window
from jaxpage.plan import NULL_BLOCK, BlockTransfers, StepPlan
from jaxpage.request import Sequence

SHARE_AHEAD = 16  # of this many free blocks one may be held for the later steps of a launch


class KVCache:
    """Gives blocks to sequences: `find`, `admit`, `grow`, `release`.

    A block may be held by several sequences; one that is about to write to it gets a copy. Blocks that no sequence
    holds keep their content until they are needed, and are found by it: the prefix cache. With host blocks, what the
    device loses can be kept there, and with a store on disk.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        windows: Windows = (None,),
        num_host_blocks: int = 0,
        preemption_mode: str | None = None,
        store: BlockStore | None = None,
    ):
        """`windows` of the KV-cache groups. `preemption_mode`: see `HostTier.should_swap`.

        Raises ValueError without a block besides the null block, or a token in each.
        """
        self.pool = BlockPool(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, windows=windows
        )
        self.tier = None
        if num_host_blocks:
            self.tier = HostTier(
                num_host_blocks, self.pool, preemption_mode=preemption_mode, store=store
            )
        self.block_size = block_size
        self.windows = windows
        self.weight_epoch = 0
        self._has_windows = any(windows)

    # Four verbs.

    def find(self, sequence: Sequence) -> FoundKV:
        """What there is of a waiting sequence's KV: cached blocks, or all that it had when it was swapped out.

        Cached blocks are whole ones, and never hold the last token: that one must be computed, so of a prompt of
        exactly k cached blocks k - 1 are found. Changes neither the sequence's tables nor any reference on the device.
        Host blocks that were found keep their content until the plan is launched; contents on disk are loaded for that.
        Valid until the next call that changes anything: `admit` it at once, or find it anew.
        """
        if sequence.host_tables:
            return self._find_swapped(sequence)
        pool, size, windows = self.pool, self.block_size, self.windows
        if not pool.enable_prefix_caching or sequence.request.params.skip_reading_prefix_cache:
            return FoundKV(0, [[] for _ in windows])
        count = num_findable(sequence, size, has_windows=self._has_windows)
        extend_hashes(sequence, count, size, self.weight_epoch)

        @cache
        def find(group: int, index: int) -> int | HostBlock:
            key = group_key(sequence.block_hashes[index], group)
            for block_id in pool.lookup([key]):
                return block_id
            for host_id in [] if self.tier is None else self.tier.find(key):
                return HostBlock(host_id)
            return NULL_BLOCK

        length = longest_prefix(find, count, windows, size)
        tables: list[list[int | HostBlock]] = []
        for group, window in enumerate(windows):
            first = first_seen_block(window, length * size, size)
            seen = [find(group, index) for index in range(first, length)]
            tables.append([NULL_BLOCK] * first + seen)
        return FoundKV(length * size, tables)

    def admit(self, sequence: Sequence, found: FoundKV, max_query_len: int) -> bool:
        """Give a waiting sequence its block tables, which begin with what `find` has just found.

        Without a window they hold all known tokens, though the first chunk may need few blocks. A promise without
        blocks would admit two prompts into the room of one, and a preemption would throw away half of a prefill. With
        windows they hold as much as may be needed at once, since a step computes at most `max_query_len` tokens; then
        blocks are freed as fast as others are gained. False, and nothing changes, if too few blocks are free.
        """
        size, pool = self.block_size, self.pool
        whole = -(-len(sequence.token_ids) // size)
        ahead = -(-(max(found.num_tokens, widest_window(self.windows) - 1) + max_query_len) // size)
        lengths = [whole if w is None else min(whole, ahead) for w in self.windows]
        if found.num_taken(pool.refs, lengths) > pool.num_free:
            return False
        for table in found.tables:
            pool.touch([hit for hit in table if isinstance(hit, int) and hit != NULL_BLOCK])
        swapped_out = bool(sequence.host_tables)
        sequence.num_computed_tokens = found.num_tokens
        # Of what was swapped out, whole blocks stay shared among those that come back together. A partial one has one
        # owner: the next token is written to it.
        num_shared = found.num_tokens // size if swapped_out else 0
        sequence.num_registered_blocks = min(
            sum(not isinstance(hit, HostBlock) for hit in table) if swapped_out else len(table)
            for table in found.tables
        )
        sequence.block_tables = [
            [
                self._swap_in(hit, share=index < num_shared) if isinstance(hit, HostBlock) else hit
                for index, hit in enumerate(table)
            ]
            for table in found.tables
        ]
        if swapped_out:
            self._release_host_blocks(sequence)
        else:
            self._register_swapped_in(sequence, found)
        sequence.num_unseen_blocks = sum(table.count(NULL_BLOCK) for table in sequence.block_tables)
        for table, length in zip(sequence.block_tables, lengths, strict=True):
            table += pool.allocate(length - len(table))
        self._set_writable_len(sequence)
        return True

    def grow(self, plan: StepPlan, sequence: Sequence, end: int, *, reserve: int = 0) -> bool:
        """Prepare a running sequence to compute its tokens up to `end`.

        It gives back blocks behind its windows, and gains blocks for those tokens and a copy of a shared block that it
        will write to; the plan tells the device. False, and nothing is gained, if fewer blocks than it needs and
        `reserve` are free.
        """
        pool, size = self.pool, self.block_size
        if self._has_windows:
            self.free_out_of_window(sequence)
        # The first table is the shortest; of its last block all groups are the same owners.
        index, offset = divmod(sequence.num_computed_tokens, size)
        table = sequence.block_tables[0]
        copies = offset > 0 and pool.refs[table[index]] > 1
        if end <= len(table) * size and not copies and not reserve:
            self._set_writable_len(sequence)
            return True
        length = -(-end // size)
        needed = self.num_copies(sequence) + num_lacking(sequence, length)
        if needed + reserve > pool.num_free:
            return False
        if copies:
            for group, table in enumerate(sequence.block_tables):
                (block_id,) = pool.allocate(1)
                plan.block_copies.append((table[index], block_id))
                plan.table_updates.append((sequence.slot, group, index, block_id))
                pool.free([table[index]])
                table[index] = block_id
        self._lengthen(plan, sequence, length)
        self._set_writable_len(sequence)
        return True

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence, on the device and on the host. Its KV can be found until it is evicted.

        At once, even with a step of this sequence under way: steps run on the device in the order of their launches,
        so whoever gets the blocks next writes after that step has read and written them.
        """
        if sequence.host_tables:
            self._release_host_blocks(sequence)
        self._release_device_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.has_mixed_kv = False

    # What else happens to sequences.

    def swap_out(self, sequence: Sequence) -> bool:
        """Move the KV of a running sequence to the host, and take its blocks.

        False, and nothing changes, if it should not be kept (`HostTier.should_swap`), or if the host has no room.
        """
        if self.tier is None or not self.tier.should_swap(sequence):
            return False
        # If it waited for a mask, the hidden state of its last token is lost: that one is computed again.
        computed = min(sequence.num_computed_tokens, sequence.num_known_tokens - 1)
        count = -(-computed // self.block_size)
        host_tables = self.tier.swap_out([table[:count] for table in sequence.block_tables])
        if not host_tables:
            return False
        self._release_device_blocks(sequence)
        sequence.host_tables = host_tables
        sequence.num_computed_tokens = computed
        return True

    def share(self, parent: Sequence, sequence: Sequence, num_blocks: int | None = None) -> None:
        """`sequence` gets the parent's KV, or that of its first `num_blocks` blocks; what it had is overwritten."""
        sequence.block_tables = [table[:num_blocks] for table in parent.block_tables]
        for table in sequence.block_tables:
            self.pool.fork(table)
        sequence.num_unseen_blocks = sum(table.count(NULL_BLOCK) for table in sequence.block_tables)
        parent.writable_len = sequence.writable_len = 0  # the first to write needs a copy
        sequence.block_hashes = parent.block_hashes[:num_blocks]
        sequence.num_registered_blocks = parent.num_registered_blocks
        sequence.num_computed_tokens = parent.num_computed_tokens
        sequence.has_mixed_kv = parent.has_mixed_kv
        if num_blocks is not None:
            sequence.num_registered_blocks = min(num_blocks, parent.num_registered_blocks)
            sequence.num_computed_tokens = num_blocks * self.block_size

    def unshare(self, sequence: Sequence) -> None:
        """Drop the references of a sequence whose KV others have taken over."""
        for table in sequence.block_tables:
            self.pool.free(table)

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens, computed or planned, findable."""
        pool, count = self.pool, num_tokens // self.block_size
        first = sequence.num_registered_blocks
        if count <= first:
            return
        sequence.num_registered_blocks = count
        if sequence.has_mixed_kv or not pool.enable_prefix_caching:
            return
        extend_hashes(sequence, count, self.block_size, self.weight_epoch)
        hashes = sequence.block_hashes
        for group, table in enumerate(sequence.block_tables):
            for index in range(first, count):
                block_id = table[index]
                key, parent = hashes[index], hashes[index - 1] if index else None
                if group:  # the first one's key is the hash itself, and calls are dear here
                    key, parent = group_key(key, group), parent and group_key(parent, group)
                # A sibling that was swapped in together with this sequence may have registered what they share, while
                # another group of this one had to swap in a block that the sibling had freed.
                if block_id != NULL_BLOCK and pool.hashes[block_id] != key:
                    pool.register(block_id, key, parent)

    def grow_ahead(self, plan: StepPlan, sequences: list[Sequence], num_steps: int) -> int:
        """Blocks for up to `num_steps` decode steps of all `sequences` in one launch; returns for how many.

        Blocks for the later steps are held from the begin of the launch: they may be few of those that are free, so
        that nobody waits or is preempted for tokens that are not there yet, and little of a scarce pool is unused. A
        row ends on the device at its `max_len`, whose last token is sampled but never computed: no block for it.
        """
        size, starts = self.block_size, plan.starts
        longest = max(s.max_len - start for s, start in zip(sequences, starts, strict=True))
        num_steps = min(num_steps, longest - 1)
        lengths: list[int] = []
        while num_steps > 1:
            lengths = [
                -(-min(start + num_steps, s.max_len - 1) // size)
                for s, start in zip(sequences, starts, strict=True)
            ]
            if SHARE_AHEAD * sum(map(num_lacking, sequences, lengths)) <= self.pool.num_free:
                break
            num_steps //= 2
        if num_steps <= 1:
            return 1
        for sequence, length in zip(sequences, lengths, strict=True):
            if length > len(sequence.block_tables[0]):
                self._lengthen(plan, sequence, length)
        return num_steps

    def num_copies(self, sequence: Sequence) -> int:
        """Shared blocks that a running sequence is about to write to."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if offset == 0:
            return 0
        return sum(self.pool.is_shared(table[index]) for table in sequence.block_tables)

    def free_out_of_window(self, sequence: Sequence) -> None:
        """Give back the blocks which no token that it has yet to compute can see.

        Steps under way may still read them: they run before whatever writes to those blocks next. Beams that come back
        together start where they differ, which is after the prompt; they keep what is seen from there.
        """
        start, size = sequence.num_computed_tokens, self.block_size
        if sequence.request.beams is not None:
            start = min(start, len(sequence.request.prompt_token_ids) // size * size)
        for window, table in zip(self.windows, sequence.block_tables, strict=True):
            end = first = first_seen_block(window, start, size)
            while first > 0 and table[first - 1] != NULL_BLOCK:
                first -= 1
            if first < end:
                self.pool.free(table[first:end])
                table[first:end] = [NULL_BLOCK] * (end - first)
                sequence.num_unseen_blocks += end - first

    # What happens to all of them.

    def begin_plan(self) -> None:
        """What the last plan moved is done, as far as any later move is concerned."""
        if self.tier is not None:
            self.tier.begin_plan()

    def take_transfers(self) -> BlockTransfers | None:
        """What moves between device, host and disk before the rows run. Call it last: it knows all that was evicted."""
        return None if self.tier is None else self.tier.take_transfers()

    def begin_weight_epoch(self, sequences: Iterable[Sequence]) -> None:
        """The weights change now: KV of before is not for those of the unfinished `sequences` that are admitted later.

        What those that have KV add to it is of other weights; their blocks do not enter the prefix cache any more.
        """
        self.weight_epoch += 1
        for sequence in sequences:
            sequence.block_hashes.clear()
            if sequence.block_tables or sequence.host_tables:
                sequence.has_mixed_kv = True
        if self.tier is not None:
            self.tier.store = None  # epochs are numbered anew in every process

    def invalidate(self, waiting: Iterable[Sequence]) -> None:
        """No block is what its hash says, after a failed step. What was swapped out is computed anew."""
        self.pool.forget_all()
        for sequence in waiting:
            self.release(sequence)
        if self.tier is not None:
            self.tier.invalidate()

    def _find_swapped(self, sequence: Sequence) -> FoundKV:
        tables: list[list[int | HostBlock]] = [
            [HostBlock(host_id) if host_id else NULL_BLOCK for host_id in table]
            for table in sequence.host_tables
        ]
        num_full = sequence.num_computed_tokens // self.block_size
        for index, block_hash in enumerate(sequence.block_hashes[:num_full]):
            on_device = [
                self.pool.lookup([group_key(block_hash, group)])
                if isinstance(table[index], HostBlock)
                else [NULL_BLOCK]
                for group, table in enumerate(tables)
            ]
            if not all(on_device):
                break
            for table, block_ids in zip(tables, on_device, strict=True):
                table[index] = block_ids[0]
        return FoundKV(sequence.num_computed_tokens, tables)

    def _swap_in(self, block: HostBlock, *, share: bool) -> int:
        assert self.tier is not None
        return self.tier.swap_in(block.block_id, share=share)

    def _register_swapped_in(self, sequence: Sequence, found: FoundKV) -> None:
        """Hits of the prefix cache on the host are on the device now, and can be found there."""
        hashes = sequence.block_hashes
        for group, table in enumerate(found.tables):
            for index, hit in enumerate(table):
                if isinstance(hit, HostBlock):
                    assert self.tier is not None
                    self.tier.num_hits += 1
                    parent = group_key(hashes[index - 1], group) if index else None
                    block_id = sequence.block_tables[group][index]
                    self.pool.register(block_id, group_key(hashes[index], group), parent)

    def _set_writable_len(self, sequence: Sequence) -> None:
        """It shares no block that it will write to. Windows and beams want to be asked each time."""
        if not self._has_windows and sequence.request.beams is None:
            sequence.writable_len = len(sequence.block_tables[0]) * self.block_size

    def _lengthen(self, plan: StepPlan, sequence: Sequence, length: int) -> None:
        """Fresh blocks up to `length` entries in each of its tables."""
        for group, table in enumerate(sequence.block_tables):
            for block_id in self.pool.allocate(max(length - len(table), 0)):
                plan.table_updates.append((sequence.slot, group, len(table), block_id))
                table.append(block_id)

    def _release_host_blocks(self, sequence: Sequence) -> None:
        assert self.tier is not None
        self.tier.release(sequence.host_tables)
        sequence.host_tables = []

    def _release_device_blocks(self, sequence: Sequence) -> None:
        if not sequence.block_tables:
            return
        # The last token of a sequence that ended was never computed.
        num_seen = len(sequence.token_ids) - sequence.finished
        self.register(sequence, min(sequence.num_computed_tokens, num_seen))
        for table in sequence.block_tables:
            self.pool.free(table)
        sequence.block_tables = []
        sequence.writable_len = sequence.num_unseen_blocks = 0
        sequence.num_registered_blocks = 0


def num_lacking(sequence: Sequence, length: int) -> int:
    """Blocks without which its tables have fewer than `length` entries."""
    return sum(max(length - len(table), 0) for table in sequence.block_tables)
