"""What the engine counts, and what of the pool's memory is waste. Nothing here decides anything.

A slot of an allocated block is waste while it holds no KV and the step does not write to it. What
several decode steps in one launch write after the first of them counts as waste too: their slots
are held early.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.request import Request, Sequence

if TYPE_CHECKING:
    from jaxpage.engine.block_pool import BlockPool
    from jaxpage.engine.scheduler import Scheduler


@dataclass(kw_only=True, slots=True)
class Counters:
    """Running totals since start, kept by the scheduler."""

    num_steps: int = 0  # launches planned; several decode steps in one launch count once
    num_requests_finished: int = 0  # aborted ones included
    num_preemptions: int = 0
    num_block_copies: int = 0  # copy-on-write
    prompt_tokens: int = 0  # of requests when first scheduled, cached ones included
    generation_tokens: int = 0  # appended to sequences
    prefix_cache_queries: int = 0  # tokens of requests when first scheduled
    prefix_cache_hits: int = 0  # tokens of them found
    num_allocated_slots: int = 0  # of the KV pool, when the last step was planned
    num_unused_slots: int = 0  # of those; a shared block counts once
    num_allocated_slot_steps: int = 0  # sum of `num_allocated_slots` over all steps
    num_unused_slot_steps: int = 0  # likewise

    def count_slots(self, pool: BlockPool, running: list[Sequence], step: ScheduledStep) -> None:
        """Take in how a step finds the pool; call it when the step is planned."""
        self.num_allocated_slots = pool.num_used * pool.block_size
        self.num_unused_slots = num_unused_slots(pool, running, step)
        self.num_allocated_slot_steps += self.num_allocated_slots
        self.num_unused_slot_steps += self.num_unused_slots


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot of the engine. Totals are since start."""

    num_running: int  # sequences that hold a request slot
    num_waiting: int  # sequences that do not
    kv_cache_usage: float  # share of the KV blocks that sequences hold, 0 to 1
    num_blocks: int  # of the KV pool that sequences can have
    num_blocks_used: int  # that sequences hold
    num_block_references: int  # the same, a block counted once for each sequence that holds it
    num_allocated_slots: int  # `num_blocks_used * block_size` when the last step was planned
    num_unused_slots: int  # of them, without KV in that step
    num_allocated_slot_steps: int  # sum of the former over all steps
    num_unused_slot_steps: int  # of the latter
    num_steps: int
    num_requests_finished: int
    num_preemptions: int
    num_recompiles: int  # compilations after warm-up; 0 unless something is wrong
    num_block_copies: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int  # tokens looked up in the prefix cache
    prefix_cache_hits: int  # tokens of them found
    prefix_cache_evictions: int  # blocks
    num_host_hit_blocks: int  # of the prefix cache, found in host memory (disk included)
    num_disk_hit_blocks: int  # of those, read from `kv_offload_dir`
    num_blocks_swapped_out: int  # to host memory, evicted ones included
    num_blocks_swapped_in: int  # back from there

    @property
    def kv_waste(self) -> float:
        """Share of the allocated slots without KV when the last step was planned, 0 to 1."""
        return self.num_unused_slots / max(self.num_allocated_slots, 1)

    @property
    def mean_kv_waste(self) -> float:
        """The same over all steps; a step weighs as many slots as were allocated."""
        return self.num_unused_slot_steps / max(self.num_allocated_slot_steps, 1)


def engine_stats(scheduler: Scheduler, num_recompiles: int) -> EngineStats:
    """The counters as of now."""
    counters, pool, tier = scheduler.counters, scheduler.pool, scheduler.tier
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        kv_cache_usage=pool.usage,
        num_blocks=pool.num_usable,
        num_blocks_used=pool.num_used,
        num_block_references=pool.num_references,
        num_recompiles=num_recompiles,
        prefix_cache_evictions=pool.num_evictions,
        num_host_hit_blocks=tier.num_hits if tier else 0,
        num_disk_hit_blocks=tier.num_loaded if tier else 0,
        num_blocks_swapped_out=tier.num_swapped_out if tier else 0,
        num_blocks_swapped_in=tier.num_swapped_in if tier else 0,
        **dataclasses.asdict(counters),
    )


def count_first_scheduling(
    counters: Counters, pool: BlockPool, request: Request, num_hit_tokens: int
) -> None:
    """Take in that a sequence is admitted, with so many tokens of its prompt found: a request counts once."""
    if request.first_scheduled_time is not None:
        return
    prompt_len = len(request.prompt_token_ids)
    request.first_scheduled_time = time.monotonic()
    request.num_cached_tokens = num_hit_tokens
    if pool.enable_prefix_caching:
        num_in_full_blocks = prompt_len // pool.block_size * pool.block_size
        request.num_cache_creation_tokens = max(0, num_in_full_blocks - num_hit_tokens)
    counters.prompt_tokens += prompt_len
    if pool.enable_prefix_caching and not request.params.skip_reading_prefix_cache:
        counters.prefix_cache_queries += prompt_len
        counters.prefix_cache_hits += num_hit_tokens


def num_unused_slots(pool: BlockPool, running: list[Sequence], step: ScheduledStep) -> int:
    """Slots of allocated blocks that hold no KV after the (first) pass of a step just planned.

    Runs with every step, so it asks no row for anything, unless there are windows. Summed over the
    sequences that hold a block, its unused slots are `block_size` less the tokens computed; only a
    block that is shared and not full makes that too much. Rows that compute a token own the block
    they write to, so such a block is held by forks of this plan, or by sequences that this plan
    leaves out.
    """
    plan, size, num_groups = step.plan, pool.block_size, len(pool.windows)
    num_used = sum(plan.starts) + sum(plan.num_tokens)
    num_twice = 0
    if step.admitted and 0 in plan.num_tokens:
        forks = zip(plan.starts, plan.num_tokens, strict=True)
        num_twice = sum(-start % size for start, count in forks if count == 0)
    if len(step.sequences) != len(running):
        left_out, left_out_twice = _sum_left_out(running, step, size)
        num_used += left_out
        num_twice += left_out_twice
    num_unseen = sum(s.num_unseen_blocks for s in running) if any(pool.windows) else 0
    return (pool.num_references + num_unseen) * size - num_groups * (num_used + num_twice)


def num_computed_slots(sequence: Sequence) -> int:
    """Slots with KV of a sequence; steps that may go on past its end on paper, do not in fact."""
    return min(sequence.num_computed_tokens, sequence.max_len - 1)


def _sum_left_out(running: list[Sequence], step: ScheduledStep, size: int) -> tuple[int, int]:
    """(slots with KV, unused slots counted twice) of running sequences without a row."""
    planned = set(map(id, step.sequences))
    num_used = num_twice = 0
    partial_blocks: set[int] = set()
    for sequence in running:
        if id(sequence) in planned:
            continue
        end = num_computed_slots(sequence)
        num_used += end
        if end % size:
            block_id = sequence.block_tables[0][end // size]  # the other groups' are shared alike
            num_twice += -end % size if block_id in partial_blocks else 0
            partial_blocks.add(block_id)
    return num_used, num_twice
