"""A snapshot of the engine's counters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.engine.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot of the engine, or of several together. Totals are since start."""

    num_running: int  # sequences that hold a request slot
    num_waiting: int  # sequences that do not
    kv_cache_usage: float  # share of the KV blocks that sequences hold, 0 to 1
    num_blocks: int  # usable blocks of the KV pool
    num_blocks_used: int  # held by sequences
    num_block_references: int  # the same, with a block counted once for each sequence that holds it
    num_allocated_slots: int  # `num_blocks_used * block_size` when the last step was planned
    num_unused_slots: int  # those of them without KV in that step
    num_allocated_slot_steps: int  # sum of `num_allocated_slots` over all steps
    num_unused_slot_steps: int  # sum of `num_unused_slots` over all steps
    num_steps: int
    num_requests_finished: int
    num_preemptions: int
    num_nan_steps: int  # in which the model computed NaN; 0 unless weights or dtype are wrong
    num_recompiles: int  # compilations after warm-up; 0 unless something is wrong
    num_block_copies: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int  # tokens looked up in the prefix cache
    prefix_cache_hits: int  # tokens found in it
    prefix_cache_evictions: int  # blocks
    num_host_hit_blocks: int  # prefix-cache hits in host memory (disk included)
    num_disk_hit_blocks: int  # of those, read from `kv_offload_dir`
    num_blocks_swapped_out: int  # to host memory, evicted ones included
    num_blocks_swapped_in: int  # back from there
    # With `speculative_config`: rows with drafts, tokens of these, and how many of them were right.
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # how many drafts were right up to each place, the first one first; until the last that ever was
    accepted_per_position: tuple[int, ...] = ()
    num_weight_changes: int = 0  # how often parameters were replaced
    num_encoded_pictures: int = 0  # videos included; one encoded twice counts twice
    # With `record_expert_load`, for each layer that has experts: how many tokens were routed to each of them.
    # Recomputed tokens and wrong drafts count too, those found in the prefix cache do not.
    expert_load: tuple[tuple[int, ...], ...] = ()
    num_failed_replicas: int = 0  # removed after failures; 1 or 0 in the counters of one replica
    replicas: tuple[EngineStats, ...] = ()  # with several replicas, the counters of each

    @property
    def kv_waste(self) -> float:
        """Share of the allocated slots without KV when the last step was planned, 0 to 1."""
        return self.num_unused_slots / max(self.num_allocated_slots, 1)

    @property
    def mean_kv_waste(self) -> float:
        """The same over all steps, weighted by the slots allocated in each."""
        return self.num_unused_slot_steps / max(self.num_allocated_slot_steps, 1)

    @property
    def expert_imbalance(self) -> tuple[float, ...]:
        """For each layer with experts: the tokens of the busiest expert divided by the mean. It ranges from 1 (all
        experts have the same number) to the number of experts (one of them has all tokens).
        """
        return tuple(max(load) * len(load) / max(sum(load), 1) for load in self.expert_load)


def engine_stats(scheduler: Scheduler, num_recompiles: int) -> EngineStats:
    """The current counters."""
    counters, pool, tier = scheduler.counters, scheduler.kv.pool, scheduler.kv.tier
    load = tuple(map(tuple, counters.expert_load.tolist()))
    counted: dict[str, Any] = dataclasses.asdict(counters) | {"expert_load": load}
    counted["accepted_per_position"] = tuple(counters.accepted_per_position)
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
        num_encoded_pictures=scheduler.pictures.num_encoded,
        **counted,
    )


def total(parts: Sequence[EngineStats]) -> EngineStats:
    """The sum of several engines' counters. Tokens of a restarted request count each time."""
    others = ("expert_load", "replicas", "accepted_per_position")
    names = [field.name for field in dataclasses.fields(EngineStats) if field.name not in others]
    numbers: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    usage = numbers["num_blocks_used"] / max(numbers["num_blocks"], 1)
    numbers["kv_cache_usage"] = usage
    positions = itertools.zip_longest(*(p.accepted_per_position for p in parts), fillvalue=0)
    return EngineStats(
        **numbers,
        expert_load=_total_load(parts),
        accepted_per_position=tuple(map(sum, positions)),
        replicas=tuple(parts),
    )


def _total_load(parts: Sequence[EngineStats]) -> tuple[tuple[int, ...], ...]:
    """The sum of the expert loads; a replica that has computed nothing yet has none."""
    loads = [part.expert_load for part in parts if part.expert_load]
    return tuple(tuple(map(sum, zip(*layers, strict=True))) for layers in zip(*loads, strict=True))


def of_failed(stats: EngineStats) -> EngineStats:
    """The totals of a failed engine, which no longer has sequences or blocks."""
    return dataclasses.replace(
        stats,
        num_running=0,
        num_waiting=0,
        kv_cache_usage=0.0,
        num_blocks=0,
        num_blocks_used=0,
        num_block_references=0,
        num_allocated_slots=0,
        num_unused_slots=0,
        num_failed_replicas=1,
    )
