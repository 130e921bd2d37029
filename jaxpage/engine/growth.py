"""How sequences that run gain blocks: for tokens to come, and copies of shared blocks before they write to them.

What this file knows: one sequence's blocks, the pool, and the plan that tells the device. What it must never learn:
who runs, who waits, who gives way when there are too few (the scheduler's).
"""

from __future__ import annotations

from jaxpage.engine.block_pool import BlockPool
from jaxpage.plan import StepPlan
from jaxpage.request import Sequence


def num_missing_blocks(pool: BlockPool, sequence: Sequence, end: int) -> int:
    """Blocks that a running sequence lacks to write its tokens up to `end`, a copy of a shared one included."""
    index, offset = divmod(sequence.num_computed_tokens, pool.block_size)
    copies = offset > 0 and pool.is_shared(sequence.block_ids[index])
    return copies + max(-(-end // pool.block_size) - len(sequence.block_ids), 0)


def grow(pool: BlockPool, plan: StepPlan, sequence: Sequence, end: int) -> None:
    """Give it the missing blocks, of which enough must be free, and tell the device."""
    block_ids = sequence.block_ids
    index, offset = divmod(sequence.num_computed_tokens, pool.block_size)
    if offset > 0 and pool.is_shared(block_ids[index]):
        (block_id,) = pool.allocate(1)
        plan.block_copies.append((block_ids[index], block_id))
        plan.table_updates.append((sequence.slot, index, block_id))
        pool.free([block_ids[index]])
        block_ids[index] = block_id
    append_blocks(pool, plan, sequence, max(-(-end // pool.block_size) - len(block_ids), 0))


def append_blocks(pool: BlockPool, plan: StepPlan, sequence: Sequence, count: int) -> None:
    for block_id in pool.allocate(count):
        plan.table_updates.append((sequence.slot, len(sequence.block_ids), block_id))
        sequence.block_ids.append(block_id)


def extend(pool: BlockPool, plan: StepPlan, decode_steps: int) -> None:
    """Rows that all decode do up to `decode_steps` steps in one launch, as blocks permit.

    A row ends on the device at its `max_len`, whose last token is sampled but never computed: no block for it.
    """
    size, sequences = pool.block_size, plan.sequences
    longest = max(s.max_len - start for s, start in zip(sequences, plan.starts, strict=True))
    num_steps = min(decode_steps, longest - 1)
    fresh: list[int] = []
    while num_steps > 1:
        fresh = [
            max(-(-min(start + num_steps, s.max_len - 1) // size) - len(s.block_ids), 0)
            for s, start in zip(sequences, plan.starts, strict=True)
        ]
        if sum(fresh) <= pool.num_free:
            break
        num_steps //= 2
    if num_steps <= 1:
        return
    plan.num_steps = num_steps
    for sequence, count in zip(sequences, fresh, strict=True):
        sequence.num_in_flight += num_steps - 1
        sequence.num_computed_tokens += num_steps - 1
        if count:
            append_blocks(pool, plan, sequence, count)
