"""Beams as sequences: they advance together, one token at a time, and share the blocks of their common past.

Knows the sequences and blocks of one beam request, and its `Beams`. Must not know other requests, slots or budgets (the
scheduler does), or which beam survives (the search decides).

A beam request has `width` sequences from its arrival to its end. Sequence i is live beam i. Sequences beyond the live
beams are idle, and so is a preempted beam: an idle sequence has no blocks. A sequence that may advance does so by one
token, and then waits for the others (`WaitingFor.BEAMS`). When all have sampled, each sequence becomes one of the
survivors, with a reference to each block of its parent. A block to which two of them would write is copied at the first
write, like any shared block. All data of a beam is uploaded again before its next row.

Beams are preempted and resumed together: the first one is computed like any sequence; the others share its blocks as
far as their tokens are equal, and compute the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxpage.engine.beams import Survivor
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.kv_groups import num_seen_blocks
from jaxpage.plan import StepResult
from jaxpage.request import FinishReason, Request, Sequence, WaitingFor


def first_sequences(
    request: Request,
    new_sequence: Callable[[Request, int], Sequence],
    kv: KVCache,
    num_slots: int,
    max_query_len: int,
) -> list[Sequence]:
    """The sequences with which a request begins; a step computes at most `max_query_len` tokens of each.

    Raises ValueError for beams that could not finish even with all `num_slots` slots and all blocks.
    """
    if request.beams is None:
        return [new_sequence(request, 0)]
    if request.mask_source is not None:
        raise ValueError(
            f"request {request.request_id!r}: beams cannot be constrained by masks; leave one out"
        )
    sequences = [new_sequence(request, index) for index in range(request.beams.width)]
    _check_width(sequences[0], kv, num_slots, max_query_len)
    for sequence in sequences:
        _wait_for_first(sequence)
    return sequences


def _check_width(first: Sequence, kv: KVCache, num_slots: int, max_query_len: int) -> None:
    width = first.request.beams.width
    if width > num_slots:
        raise ValueError(
            f"a beam width of {width} needs as many request slots, but max_num_seqs is "
            f"{num_slots}; lower beam_width or raise max_num_seqs"
        )
    prompt_len = len(first.token_ids)
    shared = prompt_len // kv.block_size
    total = -(-(first.max_len - 1) // kv.block_size)  # the last token's KV is never needed
    needed = _num_blocks(kv, first, [total - shared] * width, max_query_len)
    if needed > kv.pool.num_usable:
        raise ValueError(
            f"{width} beams from a prompt of {prompt_len} tokens to {first.max_len} tokens in all "
            f"may need {needed} blocks of {kv.block_size}, but the pool has {kv.pool.num_usable}; "
            f"lower beam_width or max_tokens, or give the pool more memory"
        )


def siblings(sequence: Sequence) -> list[Sequence]:
    """The other beams of a request, which take and leave their slots together with this first one."""
    request = sequence.request
    return [] if request.beams is None else request.sequences[1:]


def may_start(kv: KVCache, sequence: Sequence, num_free_slots: int, max_query_len: int) -> bool:
    """Whether a waiting sequence may start, as far as its siblings are concerned.

    It may not while one of them has a token in flight: that one was preempted, and the launch after its last step
    failed.
    """
    request = sequence.request
    if request.beams is None:
        return not sequence.num_in_flight
    if len(request.sequences) > num_free_slots or any(s.num_in_flight for s in request.sequences):
        return False
    first, *others = request.sequences[: len(request.beams.live)]
    if not others:
        return True
    size = kv.block_size
    total = -(-len(first.token_ids) // size)
    shared = len(request.prompt_token_ids) // size
    own = [total - _common_len(first.token_ids, other.token_ids) // size for other in others]
    return _num_blocks(kv, first, [total - shared, *own], max_query_len) <= kv.pool.num_free


def _num_blocks(kv: KVCache, first: Sequence, own: list[int], max_query_len: int) -> int:
    """Blocks of beams that share the full blocks of their prompt; `own`: further blocks of each beam in each table.

    Groups with a window hold what `KVCache.free_out_of_window` leaves of the prompt, or what computing it needs.
    """
    shared = len(first.request.prompt_token_ids) // kv.block_size
    seen = num_seen_blocks(kv.windows, kv.block_size, max_query_len)
    of_prompt = sum(shared if window is None else min(shared, seen) for window in kv.windows)
    return of_prompt + len(kv.windows) * sum(own)


def num_reserved_blocks(kv: KVCache, sequence: Sequence) -> int:
    """Blocks that must stay free when a sequence grows: those that its fellow beams still need to sample.

    So no beam has to be preempted when others of the same request are already planned.
    """
    if sequence.request.beams is None:
        return 0
    size, lacking = kv.block_size, 0
    written: set[int] = set()
    for beam in sequence.request.sequences:
        if beam.waiting_for is not None:
            continue
        if beam is not sequence:
            lacking += beam.num_lacking_blocks(-(-len(beam.token_ids) // size))
        index, offset = divmod(beam.num_computed_tokens, size)
        if offset:
            written.update(table[index] for table in beam.block_tables)
    # The last beam that writes to a shared block needs no copy.
    copies = sum(kv.pool.refs[block_id] - 1 for block_id in written)
    return lacking + copies - kv.num_copies(sequence)


def preempt(sequence: Sequence) -> None:
    """A beam has lost its blocks and will have to sample again."""
    sequence.request.beams.reports.pop(sequence.index, None)
    _wait_for_first(sequence)


def upload_beams(step: ScheduledStep, kv: KVCache) -> None:
    """Upload all data of the beams in a step before they run, and let the other beams of each request advance."""
    plan = step.plan
    slots: set[int] = set()
    for row, sequence in enumerate(step.sequences):
        if sequence.request.beams is None:
            continue
        slots.add(sequence.slot)
        if sequence not in step.admitted:
            step.admitted.append(sequence)
        if sequence.index == 0 and plan.samples[row]:
            _follow(sequence, kv)
    plan.table_updates = [update for update in plan.table_updates if update[0] not in slots]


def collect_beam(kv: KVCache, sequence: Sequence, result: StepResult, row: int) -> int:
    """Record what a beam sampled. After the last beam of a request, all continue or end. Returns the tokens gained."""
    request, beams = sequence.request, sequence.request.beams
    if not sequence.slot:
        return 0  # preempted in the meantime
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
        _go_on(kv, request.sequences, parents, survivors)
    return beams.width


def _go_on(
    kv: KVCache, sequences: list[Sequence], parents: list[Sequence], survivors: list[Survivor]
) -> None:
    """Make sequence i survivor i. `parents` are copies of the sequences as they sampled."""
    for sequence, survivor in zip(sequences, survivors, strict=True):
        parent = parents[survivor.parent]
        kv.share(parent, sequence)
        sequence.token_ids = [*parent.token_ids, survivor.token_id]
        sequence.waiting_for = None
    for parent in parents:
        kv.unshare(parent)


def _wait_for_first(sequence: Sequence) -> None:
    """Only the first beam may advance; the others wait for it."""
    sequence.waiting_for = None if sequence.index == 0 else WaitingFor.BEAMS


def _follow(first: Sequence, kv: KVCache) -> None:
    """All KV of the first beam is planned: idle live beams share its blocks where tokens are equal, and may advance."""
    request = first.request
    for sequence in request.sequences[1 : len(request.beams.live)]:
        if sequence.block_tables:
            continue
        # Full blocks only, and never all tokens: beams differ in their last token at the latest.
        count = _common_len(first.token_ids, sequence.token_ids) // kv.block_size
        kv.share(first, sequence, count)
        sequence.waiting_for = None


def _common_len(token_ids: list[int], other_ids: list[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(token_ids, other_ids, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(token_ids))
