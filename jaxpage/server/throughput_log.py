"""Logs a line every ten seconds: throughput, queue and caches. In vLLM's words, for log parsers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from jaxpage.engine.stats import EngineStats

if TYPE_CHECKING:
    from jaxpage.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

NUM_RECENT_REQUESTS = 1000  # window of the prefix cache's hit rate


async def log_throughput(llm: AsyncLLM, interval: float = 10.0) -> None:
    """Log a line every `interval` seconds, until the task is cancelled or the engine has died.

    Nothing is logged while idle, except one line after the end of activity.
    """
    line = ThroughputLine(llm.stats(), time.monotonic())
    while not llm.errored:
        await asyncio.sleep(interval)
        text = line.next(llm.stats(), time.monotonic())
        if text is not None:
            logger.info(text)


class _Hits(NamedTuple):
    """What the hit rate needs of a snapshot, which may be large: many are kept."""

    num_finished: int
    queries: int
    hits: int

    @classmethod
    def of(cls, stats: EngineStats) -> _Hits:
        return cls(stats.num_requests_finished, stats.prefix_cache_queries, stats.prefix_cache_hits)


class ThroughputLine:
    """Formats lines from snapshots of the engine. Times are seconds."""

    def __init__(self, stats: EngineStats, now: float):
        self._last, self._last_time = stats, now
        self._was_active = False
        self._recent = deque([_Hits.of(stats)])

    def next(self, stats: EngineStats, now: float) -> str | None:
        """The changes since the last call; None if nothing has changed, then or now."""
        last, seconds = self._last, max(now - self._last_time, 1e-9)
        self._last, self._last_time = stats, now
        num_prompt = stats.prompt_tokens - last.prompt_tokens
        # Tokens after a stop string may have been counted in the last snapshot, but not in this one.
        num_generated = max(0, stats.generation_tokens - last.generation_tokens)
        is_active = bool(num_prompt or num_generated or stats.num_running or stats.num_waiting)
        is_told = is_active or self._was_active
        self._was_active = is_active
        if not is_told:
            return None
        return (
            f"Engine 000: Avg prompt throughput: {num_prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {num_generated / seconds:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"GPU KV cache usage: {100 * stats.kv_cache_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * self._hit_rate(stats):.1f}%" + _replicas(stats)
        )

    def _hit_rate(self, stats: EngineStats) -> float:
        """Share of the tokens of recent prompts that the prefix cache had."""
        recent, last = self._recent, _Hits.of(stats)
        recent.append(last)
        while last.num_finished - recent[1].num_finished >= NUM_RECENT_REQUESTS:
            recent.popleft()
        first = recent[0]
        return (last.hits - first.hits) / max(last.queries - first.queries, 1)


def _replicas(stats: EngineStats) -> str:
    """Empty while all replicas work."""
    if not stats.num_failed_replicas:
        return ""
    return f", Failed replicas: {stats.num_failed_replicas} of {len(stats.replicas)}"
