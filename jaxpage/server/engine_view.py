"""The live view of the engine as data: requests, KV blocks by owner and sharing, counters, programs.

Knows what the page draws, and how to keep it cheap: one snapshot per second for all clients, a few milliseconds for a
pool of 100,000 blocks. Has ids of requests, but not their contents.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any

import numpy as np

from jaxpage.async_llm import AsyncLLM, EngineDeadError
from jaxpage.engine.activity import Activity, SequenceProgress, joined, take_activity
from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine.stats import EngineStats
from jaxpage.plan import NULL_BLOCK

LONGEST_AGE = 1.0  # seconds for which a view is cached
MAX_LISTED = 100  # of running sequences, and of waiting ones
MAX_CELLS = 2048  # of the picture of the pool
MAX_ID_LEN = 64  # characters of a request id, which clients may choose

UNLISTED = -1  # owner of a block that is not held by exactly one listed sequence


class EngineView:
    """Views of one engine, as JSON. Belongs to one event loop."""

    def __init__(self, llm: AsyncLLM):
        self._llm = llm
        self._body = b""
        self._taken = float("-inf")  # time of `_body`; seconds, monotonic
        self._taking: asyncio.Task[bytes] | None = None

    async def body(self) -> bytes:
        """A view not older than LONGEST_AGE. Raises EngineDeadError."""
        if time.monotonic() - self._taken < LONGEST_AGE:
            return self._body
        if self._taking is None:
            self._taking = asyncio.create_task(self._take())
            self._taking.add_done_callback(self._took)
        # A client that disconnects must not cancel the view for others.
        return await asyncio.shield(self._taking)

    async def _take(self) -> bytes:
        def look(scheduler: Scheduler) -> tuple[Activity, EngineStats]:
            return take_activity(scheduler, MAX_LISTED), self._llm.stats()

        found = await self._llm.with_schedulers(look)
        if not found:
            raise EngineDeadError("all replicas have failed")
        activities = [activity for activity, _ in found.values()]
        *_, (_, stats) = found.values()
        return await asyncio.to_thread(self._encode, activities, stats)

    def _took(self, task: asyncio.Task[bytes]) -> None:
        self._taking = None
        if not task.cancelled() and task.exception() is None:
            self._body, self._taken = task.result(), time.monotonic()

    def _encode(self, activities: list[Activity], stats: EngineStats) -> bytes:
        activity = joined(activities)
        programs: dict[str, dict[str, Any]] = {}  # by name: replicas have the same ones
        for p in self._llm.programs():
            first = programs.setdefault(p.name, {"name": p.name, "origin": p.origin, "calls": 0})
            first["calls"] += p.num_calls
        view = {
            "time": activity.time,  # seconds, from any origin
            "stats": dataclasses.asdict(stats),
            "programs": list(programs.values()),
            **describe(activity),
        }
        return json.dumps(view, separators=(",", ":")).encode()


def describe(activity: Activity) -> dict[str, Any]:
    """Requests and pool for the page; see `_listed`, `_shares` and `_cells`."""
    references = np.array(activity.references, np.int32)
    references[NULL_BLOCK] = 0
    is_cached = np.fromiter((h is not None for h in activity.hashes), np.bool_, len(references))
    is_own, is_shared = references == 1, references > 1
    is_cached &= references == 0
    tables = [_block_ids(sequence) for sequence in activity.running[:MAX_LISTED]]
    owners = np.full(len(references), UNLISTED, np.int32)
    for row, ids in enumerate(tables):
        owners[ids] = row
    owners[~is_own] = UNLISTED
    kinds = {"own": is_own[1:], "shared": is_shared[1:], "cached": is_cached[1:]}
    return {
        "running": [
            _listed(sequence, len(ids), int(np.count_nonzero(is_shared[ids])))
            for sequence, ids in zip(activity.running, tables, strict=False)
        ],
        "waiting": [_listed(sequence, 0, 0) for sequence in activity.waiting[:MAX_LISTED]],
        "pool": _shares(activity, kinds),
        "cells": _cells(kinds, owners[1:]),
    }


def _block_ids(sequence: SequenceProgress) -> np.ndarray:
    ids = [np.array(table, np.int32) for table in sequence.block_tables]
    joined = np.concatenate(ids) if ids else np.zeros(0, np.int32)
    return joined[joined != NULL_BLOCK]


def _listed(sequence: SequenceProgress, num_blocks: int, num_shared: int) -> dict[str, Any]:
    # The engine appends a number to the caller's request id.
    name = sequence.request_id.rpartition("#")[0] or sequence.request_id
    return {
        "id": name[:MAX_ID_LEN],
        "index": sequence.index,
        "prompt_tokens": sequence.num_prompt_tokens,
        "output_tokens": sequence.num_output_tokens,
        "computed_tokens": sequence.num_computed_tokens,
        "blocks": num_blocks,
        "shared_blocks": num_shared,
        "host_blocks": sequence.num_host_blocks,
        "age": round(sequence.age, 1),  # seconds
    }


def _shares(activity: Activity, kinds: dict[str, np.ndarray]) -> dict[str, int]:
    """Numbers of blocks: held by one sequence, by several, only by the prefix cache, by none."""
    counts = {name: int(np.count_nonzero(mask)) for name, mask in kinds.items()}
    num_blocks = len(kinds["own"])
    return {
        "block_size": activity.block_size,
        "blocks": num_blocks,
        **counts,
        "empty": num_blocks - sum(counts.values()),
        "host_blocks": activity.num_host_blocks,
        "host_blocks_used": activity.num_host_blocks_used,
    }


def _cells(kinds: dict[str, np.ndarray], owners: np.ndarray) -> dict[str, Any]:
    """The pool in at most MAX_CELLS cells, each of `blocks` consecutive blocks; the last may have fewer.

    For each cell: the number of blocks of each kind, and the listed sequence that owns most of them.
    """
    num_blocks = len(owners)
    size = -(-num_blocks // MAX_CELLS)
    starts = np.arange(0, num_blocks, size)
    counts = {name: np.add.reduceat(mask, starts, dtype=np.int32) for name, mask in kinds.items()}
    found = {name: count.tolist() for name, count in counts.items()}
    return {"blocks": size, **found, "owners": _main_owners(owners, size, len(starts)).tolist()}


def _main_owners(owners: np.ndarray, size: int, num_cells: int) -> np.ndarray:
    """int32[num_cells]: the most frequent owner among each `size` blocks; UNLISTED: none."""
    main = np.full(num_cells, UNLISTED, np.int32)
    owned = np.flatnonzero(owners != UNLISTED)
    if len(owned):
        pairs = owned // size * MAX_LISTED + owners[owned]
        pairs, counts = np.unique(pairs, return_counts=True)
        order = np.argsort(counts, kind="stable")  # the last write wins
        main[pairs[order] // MAX_LISTED] = pairs[order] % MAX_LISTED
    return main
