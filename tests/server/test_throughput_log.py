"""The line in the log: what it says, and when there is none."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from dataclasses import replace

import pytest

from jaxpage.engine.stats import EngineStats
from jaxpage.server.throughput_log import ThroughputLine, log_throughput
from tests.server.stubs import NO_STATS, StubLLM


def test_a_line_has_the_throughput_since_the_last_one():
    line = ThroughputLine(NO_STATS, 100.0)
    stats = replace(
        NO_STATS,
        prompt_tokens=500,
        generation_tokens=250,
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.125,
        prefix_cache_queries=400,
        prefix_cache_hits=100,
    )
    assert line.next(stats, 110.0) == (
        "Engine 000: Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 25.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )
    later = replace(stats, generation_tokens=350)
    assert "prompt throughput: 0.0 tokens/s, Avg generation throughput: 10.0" in (
        line.next(later, 120.0) or ""
    )


def test_a_replica_that_has_failed_is_told():
    line = ThroughputLine(NO_STATS, 100.0)
    part = replace(NO_STATS, num_running=1)
    stats = replace(part, num_failed_replicas=1, replicas=(part, NO_STATS))
    assert (line.next(stats, 110.0) or "").endswith(", Failed replicas: 1 of 2")


def test_there_is_one_more_line_when_all_has_come_to_rest():
    line, rest = ThroughputLine(NO_STATS, 0.0), replace(NO_STATS, generation_tokens=8)
    assert line.next(NO_STATS, 10.0) is None
    assert line.next(rest, 20.0) is not None
    last = line.next(rest, 30.0)
    assert last is not None and "generation throughput: 0.0 tokens/s" in last
    assert line.next(rest, 40.0) is None


def test_requests_that_get_no_tokens_are_something_that_happens():
    line, stuck = ThroughputLine(NO_STATS, 0.0), replace(NO_STATS, num_waiting=1)
    assert all("Waiting: 1 reqs" in (line.next(stuck, 10.0 * i) or "") for i in range(1, 4))


def test_tokens_that_are_taken_back_are_no_negative_throughput():
    line = ThroughputLine(replace(NO_STATS, generation_tokens=9), 0.0)
    text = line.next(replace(NO_STATS, generation_tokens=7, num_running=1), 10.0)
    assert "generation throughput: 0.0 tokens/s" in (text or "")


@pytest.mark.parametrize("num_requests", [1, 500, 2000])
def test_the_hit_rate_is_that_of_recent_requests(num_requests):
    """Twenty lines in which everything was found, then some in which nothing was."""
    line, stats = ThroughputLine(NO_STATS, 0.0), NO_STATS
    text = None
    for number in range(22):
        stats = replace(
            stats,
            prompt_tokens=stats.prompt_tokens + 1000,
            num_requests_finished=stats.num_requests_finished + num_requests,
            prefix_cache_queries=stats.prefix_cache_queries + 1000,
            prefix_cache_hits=stats.prefix_cache_hits + (1000 if number < 20 else 0),
        )
        text = line.next(stats, 10.0 * number + 10.0)
    expected = {1: "90.9%", 500: "0.0%", 2000: "0.0%"}[num_requests]
    assert (text or "").endswith(f"Prefix cache hit rate: {expected}")
    assert len(line._recent) <= 1 + 1000 / num_requests + 1 or num_requests == 1


def test_snapshots_are_not_kept():
    """With `record_expert_load` each has hundreds of kilobytes."""
    line, kept = ThroughputLine(NO_STATS, 0.0), []
    for number in range(5):
        stats = replace(NO_STATS, num_running=1, expert_load=(tuple(range(number + 1)),))
        kept.append(stats.expert_load)
        line.next(stats, 10.0 * number + 10.0)
    del stats
    holders = [sum(type(o) is EngineStats for o in gc.get_referrers(load)) for load in kept]
    assert holders == [0, 0, 0, 0, 1]


def test_lines_go_to_the_log_until_the_engine_dies(caplog):
    llm = StubLLM()

    def lines() -> list[str]:  # of this thread: a server of other tests may write its own
        return [r.message for r in caplog.records if r.thread == threading.get_ident()]

    async def run() -> None:
        task = asyncio.create_task(log_throughput(llm, interval=0.01))
        await asyncio.sleep(0.05)
        assert lines() == []
        llm.tell(generation_tokens=5)
        await asyncio.sleep(0.05)
        llm.errored = True
        await asyncio.wait_for(task, 5.0)

    with caplog.at_level(logging.INFO, logger="jaxpage.server"):
        asyncio.run(run())
    assert len(lines()) == 2
    assert lines()[0].startswith("Engine 000: Avg prompt throughput: 0.0 tokens/s")
