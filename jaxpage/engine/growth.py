"""How sequences that run gain blocks, and lose those that they cannot see any more.

They gain blocks for tokens to come, and copies of shared blocks before they write to them. What this file knows: one
sequence's blocks, the pool, and the plan that tells the device. What it must never learn: who runs, who waits, who
gives way when there are too few (the scheduler's).
"""

from __future__ import annotations

from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.kv_groups import first_seen_block
from jaxpage.plan import NULL_BLOCK, StepPlan
from jaxpage.request import Sequence

SHARE_AHEAD = 16  # of this many free blocks one may be held for the later steps of a launch


def num_missing_blocks(pool: BlockPool, sequence: Sequence, end: int) -> int:
    """Blocks that a running sequence lacks to write its tokens up to `end`, copies of shared ones included."""
    index, offset = divmod(sequence.num_computed_tokens, pool.block_size)
    copies = 0
    if offset > 0:
        copies = sum(pool.is_shared(table[index]) for table in sequence.block_tables)
    return copies + num_lacking(sequence, -(-end // pool.block_size))


def num_lacking(sequence: Sequence, length: int) -> int:
    """Blocks without which its tables have fewer than `length` entries."""
    return sum(max(length - len(table), 0) for table in sequence.block_tables)


def grow(pool: BlockPool, plan: StepPlan, sequence: Sequence, end: int) -> None:
    """Give it the missing blocks, of which enough must be free, and tell the device."""
    index, offset = divmod(sequence.num_computed_tokens, pool.block_size)
    for group, table in enumerate(sequence.block_tables):
        if offset > 0 and pool.is_shared(table[index]):
            (block_id,) = pool.allocate(1)
            plan.block_copies.append((table[index], block_id))
            plan.table_updates.append((sequence.slot, group, index, block_id))
            pool.free([table[index]])
            table[index] = block_id
    lengthen(pool, plan, sequence, -(-end // pool.block_size))


def lengthen(pool: BlockPool, plan: StepPlan, sequence: Sequence, length: int) -> None:
    """Fresh blocks up to `length` entries in each of its tables."""
    for group, table in enumerate(sequence.block_tables):
        for block_id in pool.allocate(max(length - len(table), 0)):
            plan.table_updates.append((sequence.slot, group, len(table), block_id))
            table.append(block_id)


def leave_behind(pool: BlockPool, sequence: Sequence) -> None:
    """Give back the blocks which no token that it has yet to compute can see.

    Steps under way may still read them: they run before whatever writes to those blocks next. Beams that come back
    together start where they differ, which is after the prompt; they keep what is seen from there.
    """
    start, size = sequence.num_computed_tokens, pool.block_size
    if sequence.request.beams is not None:
        start = min(start, len(sequence.request.prompt_token_ids) // size * size)
    for window, table in zip(pool.windows, sequence.block_tables, strict=True):
        end = first = first_seen_block(window, start, size)
        while first > 0 and table[first - 1] != NULL_BLOCK:
            first -= 1
        if first < end:
            pool.free(table[first:end])
            table[first:end] = [NULL_BLOCK] * (end - first)
            sequence.num_unseen_blocks += end - first


def extend(pool: BlockPool, step: ScheduledStep, decode_steps: int) -> None:
    """Rows that all decode do up to `decode_steps` steps in one launch, as blocks permit.

    Blocks for the later steps are held from the begin of the launch: they may be few of those that are free, so that
    nobody waits or gives way for tokens that are not there yet, and little of a scarce pool is unused. A row ends on
    the device at its `max_len`, whose last token is sampled but never computed: no block for it.
    """
    size, plan, sequences = pool.block_size, step.plan, step.sequences
    longest = max(s.max_len - start for s, start in zip(sequences, plan.starts, strict=True))
    num_steps = min(decode_steps, longest - 1)
    lengths: list[int] = []
    while num_steps > 1:
        lengths = [
            -(-min(start + num_steps, s.max_len - 1) // size)
            for s, start in zip(sequences, plan.starts, strict=True)
        ]
        if SHARE_AHEAD * sum(map(num_lacking, sequences, lengths)) <= pool.num_free:
            break
        num_steps //= 2
    if num_steps <= 1:
        return
    plan.num_steps = num_steps
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.num_in_flight += num_steps - 1
        sequence.num_computed_tokens += num_steps - 1
        if length > len(sequence.block_tables[0]):
            lengthen(pool, plan, sequence, length)
