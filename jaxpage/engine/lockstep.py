"""Beams as sequences: they go on together, a token at a time, and share the blocks of their past.

What this file knows: the sequences and blocks of one beam request, and its `Beams`. What it must never learn: who else
runs, slots, budgets (the scheduler's), which beam survives (the search's).

A beam request has `width` sequences from its arrival to its end. Sequence i is live beam i; those beyond the live beams
are idle, and so is a beam that gave way: an idle sequence has no blocks, and `max_len` says that it must not go on. One
that is not idle may go on by one token. The device ends it there, so it never takes several steps in a launch, and is
told of it anew before its next row. A beam that sampled keeps that token in flight until all have: then each sequence
becomes one of the survivors, with a reference to each block of its parent. What two of them would write to is copied
when the first one writes, like any shared block.

Beams give way together and come back together: the first one is computed like any sequence, the others share its
blocks as far as their tokens are the same and compute the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxpage.engine import growth
from jaxpage.engine.beams import Survivor
from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.prefix_cache import NEVER
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.kv_groups import num_seen_blocks
from jaxpage.plan import StepResult
from jaxpage.request import FinishReason, Request, Sequence


def first_sequences(
    request: Request,
    new_sequence: Callable[[Request, int], Sequence],
    pool: BlockPool,
    *,
    num_slots: int,
    max_query_len: int,
) -> list[Sequence]:
    """The sequences with which a request begins; a step computes at most `max_query_len` tokens of each.

    Raises ValueError for beams that could not end even if they had all `num_slots` slots and all blocks.
    """
    if request.beams is None:
        return [new_sequence(request, 0)]
    width = request.beams.width
    sequences = [new_sequence(request, index) for index in range(width)]
    _check_width(sequences[0], pool, num_slots, max_query_len)
    for sequence in sequences:
        _wait_for_first(sequence)
    return sequences


def _check_width(first: Sequence, pool: BlockPool, num_slots: int, max_query_len: int) -> None:
    width = first.request.beams.width
    if width > num_slots:
        raise ValueError(
            f"a beam width of {width} needs as many request slots, but max_num_seqs is "
            f"{num_slots}; lower beam_width or raise max_num_seqs"
        )
    prompt_len = len(first.token_ids)
    shared = prompt_len // pool.block_size
    total = -(-(first.max_len - 1) // pool.block_size)  # the last token's KV is never needed
    needed = _num_blocks(pool, first, [total - shared] * width, max_query_len)
    if needed > pool.num_usable:
        raise ValueError(
            f"{width} beams from a prompt of {prompt_len} tokens to {first.max_len} tokens in all "
            f"may need {needed} blocks of {pool.block_size}, but the pool has {pool.num_usable}; "
            f"lower beam_width or max_tokens, or give the pool more memory"
        )


def siblings(sequence: Sequence) -> list[Sequence]:
    """Those that take and leave their slots together with this one, the first beam of its request."""
    request = sequence.request
    return [] if request.beams is None else request.sequences[1:]


def may_enter(pool: BlockPool, sequence: Sequence, num_free_slots: int, max_query_len: int) -> bool:
    """Whether the first waiting sequence may run as far as its siblings are concerned.

    Not while one has a token in flight: it gave way, and the launch after its last step failed.
    """
    request = sequence.request
    if request.beams is None:
        return not sequence.num_in_flight
    if len(request.sequences) > num_free_slots or any(s.num_in_flight for s in request.sequences):
        return False
    first, *others = request.sequences[: len(request.beams.live)]
    if not others:
        return True
    size = pool.block_size
    total = -(-len(first.token_ids) // size)
    shared = len(request.prompt_token_ids) // size
    own = [total - _common_len(first.token_ids, other.token_ids) // size for other in others]
    return _num_blocks(pool, first, [total - shared, *own], max_query_len) <= pool.num_free


def _num_blocks(pool: BlockPool, first: Sequence, own: list[int], max_query_len: int) -> int:
    """Blocks of beams that share the whole blocks of their prompt, where each has so many blocks of `own` in a table.

    Of the prompt, groups with a window have what `growth.leave_behind` leaves, or what is needed to compute it.
    """
    shared = len(first.request.prompt_token_ids) // pool.block_size
    seen = num_seen_blocks(pool.windows, pool.block_size, max_query_len)
    of_prompt = sum(shared if window is None else min(shared, seen) for window in pool.windows)
    return of_prompt + len(pool.windows) * sum(own)


def num_missing_blocks(pool: BlockPool, sequence: Sequence, end: int) -> int:
    """Blocks that must be free for a sequence to compute its tokens up to `end`.

    For a beam: also for all others of its request that have yet to sample, up to their last tokens. Then none of them
    has to give way when others of them are planned already.
    """
    request = sequence.request
    if request.beams is None:
        return growth.num_missing_blocks(pool, sequence, end)
    size, missing = pool.block_size, 0
    written: set[int] = set()
    for beam in request.sequences:
        known = len(beam.token_ids)
        if beam.num_in_flight or known >= beam.max_len:
            continue
        missing += growth.num_lacking(beam, -(-(end if beam is sequence else known) // size))
        index, offset = divmod(beam.num_computed_tokens, size)
        if offset:
            written.update(table[index] for table in beam.block_tables)
    # The last one that writes to a shared block keeps it.
    return missing + sum(pool.refs[block_id] - 1 for block_id in written)


def give_way(sequence: Sequence) -> None:
    """A beam lost its blocks, and will sample anew."""
    beams = sequence.request.beams
    if beams is not None:
        if beams.reports.pop(sequence.index, None) is not None:
            sequence.num_in_flight = 0
        _wait_for_first(sequence)


def renew(step: ScheduledStep, pool: BlockPool) -> None:
    """Have all data of the beams in a plan go up before they run; the next beams may follow the first ones."""
    plan = step.plan
    renewed: set[int] = set()
    for row, sequence in enumerate(step.sequences):
        if sequence.request.beams is None:
            continue
        renewed.add(sequence.slot)
        if sequence not in step.admitted:
            step.admitted.append(sequence)
        if sequence.index == 0 and plan.samples[row]:
            _follow(sequence, pool)
    if renewed:
        plan.table_updates = [update for update in plan.table_updates if update[0] not in renewed]


def report(pool: BlockPool, sequence: Sequence, result: StepResult, row: int) -> int:
    """Take in what a beam sampled. When it was the last of them, all go on or end: returns the tokens gained."""
    request, beams = sequence.request, sequence.request.beams
    assert beams is not None
    if not sequence.slot:
        return 0  # it gave way meanwhile
    sequence.num_in_flight = 1
    count = beams.num_candidates
    token_ids = result.top_token_ids[0, row, :count].tolist()
    logprobs = result.top_logprobs[0, row, :count].tolist()
    beams.reports[sequence.index] = list(zip(token_ids, logprobs, strict=True))
    if len(beams.reports) < len(beams.live):
        return 0
    parents = [dataclasses.replace(s) for s in request.sequences[: len(beams.live)]]
    survivors = beams.advance([beams.reports[parent.index] for parent in parents])
    beams.reports.clear()
    if beams.done:
        by_eos = beams.ended[0].ended_by_eos
        for beam in request.sequences:
            beam.finish_reason = FinishReason.STOP if by_eos else FinishReason.LENGTH
    else:
        _go_on(pool, request.sequences, parents, survivors)
    return beams.width


def _go_on(
    pool: BlockPool,
    sequences: list[Sequence],
    parents: list[Sequence],
    survivors: list[Survivor],
) -> None:
    """Make sequence i survivor i. `parents` are copies of the sequences as they sampled."""
    for survivor in survivors:
        for table in parents[survivor.parent].block_tables:
            pool.fork(table)
    for parent in parents:
        for table in parent.block_tables:
            pool.free(table)
    for sequence, survivor in zip(sequences, survivors, strict=True):
        parent = parents[survivor.parent]
        sequence.token_ids = [*parent.token_ids, survivor.token_id]
        sequence.block_tables = [list(table) for table in parent.block_tables]
        sequence.num_unseen_blocks = parent.num_unseen_blocks
        sequence.block_hashes = list(parent.block_hashes)
        sequence.num_registered_blocks = parent.num_registered_blocks
        sequence.num_computed_tokens = parent.num_computed_tokens
        sequence.num_in_flight = 0
        sequence.max_len = len(sequence.token_ids) + 1


def _wait_for_first(sequence: Sequence) -> None:
    """The first beam may go on by a token, the others not before it."""
    sequence.max_len = len(sequence.token_ids) + (sequence.index == 0)


def _follow(first: Sequence, pool: BlockPool) -> None:
    """All KV of the first beam is planned: idle live beams share what is theirs too, and may go on."""
    request = first.request
    for sequence in request.sequences[1 : len(request.beams.live)]:
        if sequence.max_len > len(sequence.token_ids):
            continue
        # Whole blocks, and never all tokens: beams differ in their last one, if not before.
        count = _common_len(first.token_ids, sequence.token_ids) // pool.block_size
        sequence.block_tables = [table[:count] for table in first.block_tables]
        sequence.num_unseen_blocks = first.num_unseen_blocks
        for table in sequence.block_tables:
            pool.fork(table)
        sequence.block_hashes = first.block_hashes[:count]
        known = first.num_registered_blocks
        sequence.num_registered_blocks = NEVER if known == NEVER else count
        sequence.num_computed_tokens = count * pool.block_size
        sequence.max_len = len(sequence.token_ids) + 1


def _common_len(token_ids: list[int], other_ids: list[int]) -> int:
    """Tokens that two sequences have in common from their start."""
    pairs = zip(token_ids, other_ids, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(token_ids))
