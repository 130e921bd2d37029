"""`jaxpage bench startup`: how long an engine takes to start with an empty program cache and with a full one."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpage.bench import results
from jaxpage.bench.flags import check_least
from jaxpage.bench.offline import Shape, checkpoint, machine
from jaxpage.bench.peers import starts
from jaxpage.bench.workloads import MAX_NUM_SEQS
from jaxpage.flags import EngineFlags, given_options

EVENTS = {"first_token": "first token, s", "warm": "all programs, s"}


@dataclass(frozen=True, kw_only=True)
class StartupFlags(EngineFlags):
    """The options of `LLM`, with this benchmark's default sizes."""

    max_model_len: int | str | None = 1024
    max_num_seqs: int | None = MAX_NUM_SEQS


@dataclass(frozen=True, kw_only=True)
class StartupBench:
    """Time cold and cached starts in fresh processes, from before the first import."""

    shape: Shape = "qwen2.5-0.5b"  # random weights of this shape
    model: Path | None = None  # a checkpoint folder, instead of a shape
    rounds: int = 3  # each has a cold start and a cached one
    threads: int = 2
    python: str = sys.executable  # whose jax is measured
    json: Path | None = None  # all times go to this file
    engine: StartupFlags = field(default_factory=StartupFlags)


def main(bench: StartupBench) -> None:
    """Measure, print medians, and write all times to `bench.json` if given.

    Raises RuntimeError if a start fails.
    """
    check_least(bench, rounds=1, threads=1)
    options = given_options(bench.engine, EngineFlags)
    folder, _ = checkpoint(bench.shape, bench.model)
    rounds = [
        dict(starts(folder, options, python=bench.python, threads=bench.threads))
        for _ in range(bench.rounds)
    ]
    report = {"model": str(folder), "options": options, "machine": machine(), "rounds": rounds}
    results.publish(report, bench.json, show(rounds))


def show(rounds: list[dict[str, dict[str, Any]]]) -> str:
    """Medians, and ranges if there are several rounds."""
    rows = [["start", *EVENTS.values()]]
    for cache in rounds[0]:
        seconds = [[times[cache][event] for times in rounds] for event in EVENTS]
        rows.append([cache, *map(_spread, seconds)])
    return results.table(rows)


def _spread(seconds: list[float]) -> str:
    shown = f"{statistics.median(seconds):.1f}"
    return shown if len(seconds) == 1 else f"{shown} ({min(seconds):.1f} to {max(seconds):.1f})"
