"""The KV blocks of all sequences: allocation, prefix cache, copy-on-write, swapping.

Knows sequences, their blocks on device and host, and the plan that tells the device about changes. Must not know which
sequences run, wait or are preempted (the scheduler decides that).

It owns these fields of a sequence: `block_tables`, `writable_len`, `num_unseen_blocks`, `host_tables`, `block_hashes`,
`num_registered_blocks`, `has_mixed_kv`, `state_slot`, `state_borders`. It also sets `num_computed_tokens` when a
sequence gains or loses cached KV.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.engine.block_hashes import extend_hashes, group_key
from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.found_kv import FoundKV, HostBlock, cached_kv, num_findable, swapped_kv
from jaxpage.engine.host_tier import BlockStore, HostTier
from jaxpage.engine.state_cache import StateCache
from jaxpage.kv_groups import Windows, first_seen_block, widest_window
from jaxpage.plan import NULL_BLOCK, BlockTransfers, StepPlan
from jaxpage.request import Sequence

SHARE_AHEAD = 16  # at most one of so many free blocks is held for later steps, or for drafts


class KVCache:
    """Gives blocks to sequences: `find`, `admit`, `grow`, `release`.

    Several sequences may hold the same block; one that is about to write to it gets a copy. Blocks that no sequence
    holds keep their content until they are evicted, and are found by its hash: the prefix cache. Evicted blocks can
    move to host blocks, and from there to a store on disk.
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
        states: StateCache | None = None,
    ):
        """`windows` of the KV-cache groups. `preemption_mode`: see `HostTier.should_swap`. `states`: those that the
        prefix cache needs too, if the model has a recurrent state.

        Raises ValueError if `num_blocks` is below 2 (one is the null block) or `block_size` below 1.
        """
        self.pool = BlockPool(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, windows=windows
        )
        self.tier = None
        if num_host_blocks:
            self.tier = HostTier(
                num_host_blocks, self.pool, preemption_mode=preemption_mode, store=store
            )
        self.states, self.block_size, self.windows = states, block_size, windows
        self.weight_epoch, self._has_windows = 0, any(windows)

    # The four main methods.

    def find(self, sequence: Sequence) -> FoundKV:
        """The available KV of a waiting sequence: cached blocks, or everything it had when it was swapped out.

        Cached blocks are full, and never include the last token, which must be computed: of a prompt of exactly k
        cached blocks, k - 1 are found. Changes neither the sequence's tables nor reference counts on the device. Host
        blocks that it finds, some of them just loaded from disk, keep their content until the plan is launched. The
        result is valid until the next call that changes anything: `admit` it at once, or call `find` again.
        """
        if sequence.host_tables:
            return swapped_kv(sequence, self.pool)
        pool, size, windows = self.pool, self.block_size, self.windows
        if not pool.enable_prefix_caching or sequence.request.params.skip_reading_prefix_cache:
            return FoundKV(0, [[] for _ in windows])
        count = num_findable(sequence, size, has_windows=self._has_windows)
        extend_hashes(sequence, count, size, self.weight_epoch)
        return cached_kv(sequence.block_hashes[:count], self._lookup, windows, size, self.states)

    def admit(self, sequence: Sequence, found: FoundKV, max_query_len: int) -> bool:
        """Give a waiting sequence its block tables, which begin with what `find` has just found.

        Without windows the tables hold all known tokens, although the first chunk may need only a few blocks: otherwise
        two prompts could be admitted where only one fits, and a preemption would waste half of a prefill. With windows
        they hold as much as may be needed at once, since a step computes at most `max_query_len` tokens; after that,
        blocks are freed as fast as others are gained. Returns False and changes nothing if too few blocks are free.
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
        sequence.state_slot, sequence.state_borders = found.state_slot, found.state_borders
        if found.state_slot:
            assert self.states is not None
            self.states.touch(sequence.block_hashes[found.num_tokens // size - 1])
        # Sequences swapped in together keep sharing full blocks. A partial block has one owner, which writes its next
        # token to it.
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

        Frees blocks behind its windows, and allocates blocks for those tokens and copies of shared blocks that it will
        write to; the plan tells the device. Returns False and allocates nothing if that would leave fewer than
        `reserve` blocks free.
        """
        pool, size = self.pool, self.block_size
        if self._has_windows:
            self.free_out_of_window(sequence, sequence.num_computed_tokens)
        # The first table is the shortest, and a block is shared by the same sequences in all groups.
        index, offset = divmod(sequence.num_computed_tokens, size)
        table = sequence.block_tables[0]
        copies = offset > 0 and pool.refs[table[index]] > 1
        if end <= len(table) * size and not copies and not reserve:
            self._set_writable_len(sequence)
            return True
        length = -(-end // size)
        needed = self.num_copies(sequence) + sequence.num_lacking_blocks(length)
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
        """Free all blocks of a sequence, on device and host. Its KV stays in the prefix cache until it is evicted.

        This is safe while a step of the sequence is in flight: steps run on the device in the order of their launches,
        so the next owner of a block writes to it only after that step.
        """
        if sequence.host_tables:
            self._release_host_blocks(sequence)
        self._release_device_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.has_mixed_kv = False

    # Other operations on sequences.

    def swap_out(self, sequence: Sequence) -> bool:
        """Move the KV of a running sequence to the host, and free its device blocks.

        Returns False if `HostTier.should_swap` says no, or if the host has no room; what no window sees is freed.
        """
        if self.tier is None or not self.tier.should_swap(sequence):
            return False
        # If it was waiting for a mask, the hidden state of its last token is lost, and that token is recomputed.
        computed = min(sequence.num_computed_tokens, sequence.num_known_tokens - 1)
        self.free_out_of_window(sequence, computed)  # `admit` reserves one window and one chunk
        count = -(-computed // self.block_size)
        host_tables = self.tier.swap_out([table[:count] for table in sequence.block_tables])
        if not host_tables:
            return False
        self._release_device_blocks(sequence)
        sequence.host_tables, sequence.num_computed_tokens = host_tables, computed
        return True

    def share(self, parent: Sequence, sequence: Sequence, num_blocks: int | None = None) -> None:
        """Let `sequence` share the parent's KV, or that of its first `num_blocks` blocks; overwrites its own tables."""
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
        """Drop the block references of a sequence without registering its blocks or changing it."""
        for table in sequence.block_tables:
            self.pool.free(table)

    def keep_state(self, plan: StepPlan, sequence: Sequence) -> None:
        """Keep the state after the tokens that a sequence will have computed with this plan, at one of its borders."""
        if self.states is None or sequence.has_mixed_kv:
            return
        key = sequence.block_hashes[sequence.num_computed_tokens // self.block_size - 1]
        if slot := self.states.save(key):
            plan.state_saves.append((sequence.slot, slot))

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the full blocks of the first `num_tokens` tokens, computed or planned, to the prefix cache."""
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
                if group:  # the key of group 0 is the hash itself, and this loop is hot
                    key, parent = group_key(key, group), parent and group_key(parent, group)
                # A sibling swapped in together with this sequence may already have registered a shared block, if this
                # sequence had to swap in a block of another group that the sibling had freed.
                if block_id != NULL_BLOCK and pool.hashes[block_id] != key:
                    pool.register(block_id, key, parent)

    def grow_ahead(self, plan: StepPlan, sequences: list[Sequence], num_steps: int) -> int:
        """Allocate blocks for up to `num_steps` decode steps of all `sequences` in one launch. Returns the number of
        steps that have blocks.

        These blocks are held from the start of the launch. They may take only a small share of the free blocks, so that
        no sequence waits or is preempted for tokens that do not exist yet. A row ends on the device at its `max_len`;
        its last token is sampled but never computed, and needs no block.
        """
        size, starts = self.block_size, plan.starts
        longest = max(s.max_len - start for s, start in zip(sequences, starts, strict=True))
        num_steps = min(num_steps, longest - 1)
        lengths, lacking = list[int](), Sequence.num_lacking_blocks
        while num_steps > 1:
            lengths = [
                -(-min(start + num_steps, s.max_len - 1) // size)
                for s, start in zip(sequences, starts, strict=True)
            ]
            if SHARE_AHEAD * sum(map(lacking, sequences, lengths)) <= self.pool.num_free:
                break
            num_steps //= 2
        if num_steps <= 1:
            return 1
        for sequence, length in zip(sequences, lengths, strict=True):
            if length > len(sequence.block_tables[0]):
                self._lengthen(plan, sequence, length)
        return num_steps

    def lengthen(self, plan: StepPlan, sequence: Sequence, end: int) -> int:
        """Allocate blocks for drafts up to `end`, if that is a small share of the free ones; returns how far."""
        length = -(-end // self.block_size)
        if SHARE_AHEAD * sequence.num_lacking_blocks(length) <= self.pool.num_free:
            self._lengthen(plan, sequence, length)
            return end
        return len(sequence.block_tables[0]) * self.block_size

    def num_copies(self, sequence: Sequence) -> int:
        """How many shared blocks a running sequence is about to write to, and must copy."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        tables = sequence.block_tables if offset else ()
        return sum(self.pool.is_shared(table[index]) for table in tables)

    def free_out_of_window(self, sequence: Sequence, start: int) -> None:
        """Free the blocks that none of its tokens from `start` on can see.

        Steps in flight may still read them; they run before any later write to those blocks. Beams that are resumed
        together start where they differ, after the prompt, so they keep what is visible from there.
        """
        size = self.block_size
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

    def begin_plan(self) -> None:
        """Start a new plan: later moves run after all moves of the last plan."""
        if self.tier is not None:
            self.tier.begin_plan()
        if self.states is not None:
            self.states.begin_plan()

    def take_transfers(self) -> BlockTransfers | None:
        """The transfers between device, host and disk for this plan. Call it last, when all evictions are known."""
        return None if self.tier is None else self.tier.take_transfers()

    def begin_weight_epoch(self, sequences: Iterable[Sequence]) -> None:
        """The weights change now: sequences admitted from here on do not find KV of the old weights.

        Unfinished `sequences` that hold KV will mix it with KV of the new weights, so their blocks no longer enter the
        prefix cache.
        """
        self.weight_epoch += 1
        for sequence in sequences:
            sequence.block_hashes.clear()
            if sequence.block_tables or sequence.host_tables:
                sequence.has_mixed_kv = True

    def leave_store(self) -> None:
        """Neither read nor write the store on disk any more, which is for the weights of the start."""
        if self.tier is not None:
            self.tier.store = None

    def invalidate(self, waiting: Iterable[Sequence]) -> None:
        """After a failed step, trust no cached block. Swapped-out sequences among `waiting` are recomputed."""
        self.pool.forget_all()
        for sequence in waiting:
            self.release(sequence)
        if self.tier is not None:
            self.tier.invalidate()
        if self.states is not None:
            self.states.forget_all()

    def _lookup(self, key: bytes) -> int | HostBlock:
        """The block with this key in the prefix cache, on the device if possible; NULL_BLOCK: there is none."""
        if (block_id := self.pool.lookup(key)) is not None:
            return block_id
        host_id = None if self.tier is None else self.tier.find(key)
        return NULL_BLOCK if host_id is None else HostBlock(host_id)

    def _swap_in(self, block: HostBlock, *, share: bool) -> int:
        assert self.tier is not None
        return self.tier.swap_in(block.block_id, share=share)

    def _register_swapped_in(self, sequence: Sequence, found: FoundKV) -> None:
        """Prefix-cache hits on the host are on the device now: register them there too."""
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
        """Call it when the sequence shares no block that it will write to. With windows or beams, every step asks."""
        if not self._has_windows and sequence.request.beams is None:
            sequence.writable_len = len(sequence.block_tables[0]) * self.block_size

    def _lengthen(self, plan: StepPlan, sequence: Sequence, length: int) -> None:
        """Extend each of its tables to `length` entries with newly allocated blocks."""
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
        num_tokens = len(sequence.token_ids) - sequence.finished
        self.register(sequence, min(sequence.num_computed_tokens, num_tokens))
        for table in sequence.block_tables:
            self.pool.free(table)
        sequence.block_tables = []
        sequence.writable_len = sequence.num_unseen_blocks = 0
        sequence.num_registered_blocks = 0
