"""The scheduler's counters, and how much of the KV pool is wasted. Nothing here affects scheduling.

A slot of an allocated block is wasted while it holds no KV and the current step does not write to it. In a launch of
several decode steps, the slots of all steps after the first count as wasted too, because they are held early.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np

from jaxpage.engine.block_pool import BlockPool
from jaxpage.plan import StepPlan, StepResult
from jaxpage.request import Request, Sequence

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals since start, updated by the scheduler."""

    num_steps: int = 0  # launches planned; several decode steps in one launch count once
    num_requests_finished: int = 0  # aborted ones included
    num_preemptions: int = 0
    num_block_copies: int = 0  # copy-on-write
    prompt_tokens: int = 0  # of requests when first scheduled, cached ones included
    generation_tokens: int = 0  # appended to sequences
    prefix_cache_queries: int = 0  # tokens of requests when first scheduled
    prefix_cache_hits: int = 0  # tokens of them found
    num_allocated_slots: int = 0  # of the KV pool, when the last step was planned
    num_unused_slots: int = 0  # the wasted ones among them; a shared block counts once
    num_allocated_slot_steps: int = 0  # sum of `num_allocated_slots` over all steps
    num_unused_slot_steps: int = 0  # likewise
    num_weight_changes: int = 0  # how often parameters were replaced
    num_nan_steps: int = 0  # in which the model computed NaN for a row that sampled
    num_drafts: int = 0  # rows with drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that were right
    accepted_per_position: list[int] = field(default_factory=list)  # by place in their draft
    # tokens routed to each expert of each layer that has experts, int64[L, X]; empty if not counted
    expert_load: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def count_step(
        self, pool: BlockPool, running: list[Sequence], plan: StepPlan, sequences: list[Sequence]
    ) -> None:
        """Count a step and the state of the pool, when the step is planned. `sequences` are those of its rows."""
        self.num_steps += 1
        self.num_block_copies += len(plan.block_copies)
        self.num_allocated_slots = pool.num_used * pool.block_size
        self.num_unused_slots = num_unused_slots(pool, running, plan, sequences)
        self.num_allocated_slot_steps += self.num_allocated_slots
        self.num_unused_slot_steps += self.num_unused_slots

    def count_result(self, plan: StepPlan, result: StepResult, num_tokens: int) -> None:
        """Count the result of a step, from which sequences gained `num_tokens`."""
        self.generation_tokens += num_tokens
        self.num_drafts += len(plan.num_drafts)
        self.num_draft_tokens += sum(plan.num_drafts.values())
        for row in plan.num_drafts:
            self._count_accepted(int(result.num_sampled[row]) - 1)
        if result.expert_load.size:
            before = self.expert_load if self.expert_load.size else 0
            self.expert_load = before + result.expert_load.astype(np.int64)
        # A raw logprob is NaN if any logit of its row is.
        if np.isnan(result.logprobs).any() and np.isnan(_of_sampled(result)).any():
            if not self.num_nan_steps:
                logger.warning(
                    "the model computes NaN, so its tokens mean nothing; check the weights, or take "
                    "another dtype. stats().num_nan_steps counts such steps"
                )
            self.num_nan_steps += 1

    def _count_accepted(self, number: int) -> None:
        """Count the right tokens of a draft: its first `number`."""
        self.num_accepted_tokens += number
        by_position = self.accepted_per_position
        by_position.extend([0] * (number - len(by_position)))
        for position in range(number):
            by_position[position] += 1


def _of_sampled(result: StepResult) -> np.ndarray:
    """The logprobs of the tokens that were really sampled."""
    step = np.arange(len(result.logprobs))[:, None]
    return result.logprobs[step < result.num_sampled]


def count_first_scheduling(
    counters: Counters, pool: BlockPool, request: Request, num_hit_tokens: int
) -> None:
    """Count a request when its first sequence is admitted, with `num_hit_tokens` of its prompt found."""
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


def num_unused_slots(
    pool: BlockPool, running: list[Sequence], plan: StepPlan, sequences: list[Sequence]
) -> int:
    """Slots of allocated blocks that hold no KV after the (first) pass of a step just planned.

    This runs with every step, so it does not look at each row, unless there are windows. It counts a block's unused
    slots (`block_size` less the computed tokens) once for each sequence that holds the block, which is too much only
    for a block that is shared and not full. Rows that compute a token own the block they write to, so such a block is
    held by sibling rows of this plan, or by sequences for which the plan computes nothing.
    """
    size, num_groups = pool.block_size, len(pool.windows)
    first_late = plan.num_rows - plan.num_late_rows
    num_used = sum(plan.starts[:first_late]) + sum(plan.num_tokens)
    num_twice = 0
    if plan.admissions and 0 in plan.num_tokens:
        computed = zip(plan.starts[:first_late], plan.num_tokens[:first_late], strict=True)
        num_twice = sum(-start % size for start, count in computed if count == 0)
    if first_late != len(running):
        left_out, left_out_twice = _sum_left_out(running, sequences[:first_late], size)
        num_used += left_out
        num_twice += left_out_twice
    num_unseen = sum(s.num_unseen_blocks for s in running) if any(pool.windows) else 0
    return (pool.num_references + num_unseen) * size - num_groups * (num_used + num_twice)


def num_computed_slots(sequence: Sequence) -> int:
    """Slots of a sequence with KV. Planned steps may exceed its end, but the device stops there."""
    return min(sequence.num_computed_tokens, sequence.max_len - 1)


def _sum_left_out(running: list[Sequence], computed: list[Sequence], size: int) -> tuple[int, int]:
    """(slots with KV, unused slots counted twice) of running sequences for which a step computes nothing."""
    planned = set(map(id, computed))
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
