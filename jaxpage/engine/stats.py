"""What the engine counts. Data only; nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Counters:
    """Running totals since start, kept by the scheduler."""

    num_steps: int = 0  # launches planned; several decode steps in one launch count once
    num_requests_finished: int = 0  # aborted ones included
    num_preemptions: int = 0
    num_block_copies: int = 0  # copy-on-write
    prompt_tokens: int = 0  # of requests when first scheduled, cached ones included
    generation_tokens: int = 0  # appended to sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot of the engine. Totals are since start."""

    num_running: int  # sequences that hold a request slot
    num_waiting: int  # sequences that do not
    kv_cache_usage: float  # share of the KV blocks that sequences hold, 0 to 1
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
