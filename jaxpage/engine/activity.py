"""What the engine is doing at one moment, for callers that poll it every second while it works.

Knows how to copy the lists of the scheduler and its pools. Must not change them or compute anything from them.
`jaxpage.engine.snapshot` has the whole KV pool as arrays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpage.engine.scheduler import Scheduler
    from jaxpage.request import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceProgress:
    """The progress of one continuation of a request."""

    request_id: str
    index: int  # 0 .. n-1
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int  # tokens with KV once all launched steps are done
    age: float  # seconds since the request arrived
    # block ids on the device, a table for each KV-cache group; NULL_BLOCK: behind the group's window
    block_tables: list[list[int]]
    num_host_blocks: int  # while it is swapped out


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Copies of sequences and blocks, so that whoever processes them does not delay the engine's steps."""

    time: float  # seconds, monotonic
    block_size: int
    running: list[SequenceProgress]
    waiting: list[SequenceProgress]  # those at the head of the queue
    references: list[int]  # of each block of the device, the null block included
    hashes: list[bytes | None]  # of each block; None: not in the prefix cache
    num_host_blocks: int  # for sequences and cache; 0: there is no host tier
    num_host_blocks_used: int  # held by sequences


def take_activity(scheduler: Scheduler, max_waiting: int) -> Activity:
    """The current state, with at most `max_waiting` waiting sequences. Takes 2 ms for 100,000 blocks."""
    pool, tier = scheduler.kv.pool, scheduler.kv.tier
    now = time.monotonic()
    return Activity(
        time=now,
        block_size=scheduler.kv.block_size,
        running=[_progress(sequence, now) for sequence in scheduler.running],
        waiting=[_progress(sequence, now) for sequence in scheduler.waiting[:max_waiting]],
        references=list(pool.refs),
        hashes=list(pool.hashes),
        num_host_blocks=tier.pool.num_usable if tier else 0,
        num_host_blocks_used=tier.pool.num_used if tier else 0,
    )


def joined(parts: Items[Activity]) -> Activity:
    """Several engines as one whose pool has the blocks of the first engine, then those of the second, and so on."""
    if len(parts) == 1:
        return parts[0]
    first = replace(
        parts[0], running=[], waiting=[], references=parts[0].references[:1], hashes=[None]
    )
    for part in parts:
        offset = len(first.references) - 1  # all parts share one null block
        first = replace(
            first,
            running=[*first.running, *(_moved(s, offset) for s in part.running)],
            waiting=[*first.waiting, *part.waiting],
            references=[*first.references, *part.references[1:]],
            hashes=[*first.hashes, *part.hashes[1:]],
        )
    return replace(
        first,
        num_host_blocks=sum(part.num_host_blocks for part in parts),
        num_host_blocks_used=sum(part.num_host_blocks_used for part in parts),
    )


def _moved(sequence: SequenceProgress, offset: int) -> SequenceProgress:
    tables = [[block and block + offset for block in table] for table in sequence.block_tables]
    return replace(sequence, block_tables=tables)


def _progress(sequence: Sequence, now: float) -> SequenceProgress:
    request = sequence.request
    return SequenceProgress(
        request_id=request.request_id,
        index=sequence.index,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=sequence.num_output_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        age=now - request.queued_time,
        block_tables=[list(table) for table in sequence.block_tables],
        num_host_blocks=sum(map(len, sequence.host_tables)),
    )
