"""`jaxpage bench scheduler`: what a decode step costs the host, without any device.

Drives the engine's own `Scheduler` and the runner's own `pack_step`; a stand-in answers each plan
at once. On fast chips this, not the model, is what bounds small models, so it must stay far below
a millisecond. Must not know how either of them works inside.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduler import Scheduler
from jaxpage.plan import StepPlan, StepResult
from jaxpage.request import Request
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.pack import pack_step, step_layout
from jaxpage.sampling_params import SamplingParams

PARTS = ("schedule", "pack", "update")


@dataclass(frozen=True, kw_only=True)
class SchedulerBench:
    """Measure the host's part of a decode step: schedule, pack, and taking in the result."""

    rows: tuple[int, ...] = (32, 64, 256)  # running requests
    context: int = 512  # tokens of each request when measuring begins
    steps: int = 300
    block_size: int = 16
    json: Path | None = None  # all timings go to this file


def main(bench: SchedulerBench) -> None:
    """Measure, print a table, and write all timings to `bench.json` if asked for."""
    report = measure(bench)
    if bench.json is not None:
        bench.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


def measure(bench: SchedulerBench) -> dict[str, Any]:
    """Microseconds of each part of each step, by rows. Raises ValueError for bad sizes."""
    sizes = (*bench.rows, bench.context - 1, bench.steps, bench.block_size)
    if not bench.rows or min(sizes) < 1:
        raise ValueError(f"sizes must be positive, and the context 2 tokens or more: {bench}")
    results = [{"rows": rows, "microseconds": _measure(rows, bench)} for rows in bench.rows]
    return {"context": bench.context, "block_size": bench.block_size, "results": results}


def _measure(num_rows: int, bench: SchedulerBench) -> dict[str, list[float]]:
    scheduler = _running(num_rows, bench)
    layout = step_layout(
        Bucket(num_rows, num_rows, decode=True), block_size=bench.block_size, decode_steps=1
    )
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(bench.steps):
        start = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        assert step is not None and step.plan.num_tokens == [1] * num_rows
        pack_step(step.plan, layout)
        packed = time.perf_counter()
        result = answer(step.plan)
        answered = time.perf_counter()
        scheduler.update(step, result)
        updated = time.perf_counter()
        seconds = (scheduled - start, packed - scheduled, updated - answered)
        for part, value in zip(PARTS, seconds, strict=True):
            times[part].append(value * 1e6)
    return times


def _running(num_rows: int, bench: SchedulerBench) -> Scheduler:
    """A scheduler whose `num_rows` requests have computed their prompts and go on for long."""
    max_model_len = bench.context + bench.steps + 1
    blocks_per_row = -(-max_model_len // bench.block_size)
    kv = KVCache(1 + num_rows * blocks_per_row, bench.block_size, enable_prefix_caching=True)
    scheduler = Scheduler(
        kv,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows * bench.context,  # one step takes all the prompts
        max_model_len=max_model_len,
    )
    rng = np.random.default_rng(0)
    for number in range(num_rows):
        prompt = rng.integers(3, 30000, bench.context - 1).tolist()
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
        scheduler.add(
            Request(request_id=str(number), prompt_token_ids=prompt, params=params, seed=number)
        )
    step = scheduler.schedule()
    assert step is not None and step.plan.num_rows == num_rows
    scheduler.update(step, answer(step.plan))
    return scheduler


def answer(plan: StepPlan) -> StepResult:
    """Token 7 for every row that samples."""
    num_steps, num_rows = plan.num_steps, plan.num_rows
    return StepResult(
        token_ids=np.full((num_steps, num_rows), 7, np.int32),
        num_sampled=np.where(plan.samples, num_steps, 0).astype(np.int32),
        logprobs=np.zeros((num_steps, num_rows), np.float32),
        ranks=np.ones((num_steps, num_rows), np.int32),
        top_token_ids=np.zeros((num_steps, num_rows, 0), np.int32),
        top_logprobs=np.zeros((num_steps, num_rows, 0), np.float32),
    )


def table(report: dict[str, Any]) -> str:
    """Median and 90th percentile in microseconds; the last column is what a launch waits for."""
    columns = (*PARTS, "schedule + pack")
    lines = [f"context {report['context']}, microseconds: median (p90)"]
    lines.append(f"{'rows':>5}" + "".join(f"{column:>20}" for column in columns))
    for result in report["results"]:
        times = dict(result["microseconds"])
        both = zip(times["schedule"], times["pack"], strict=True)
        times["schedule + pack"] = [schedule + pack for schedule, pack in both]
        cells = [
            f"{statistics.median(times[c]):.0f} ({np.percentile(times[c], 90):.0f})"
            for c in columns
        ]
        lines.append(f"{result['rows']:>5}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)
