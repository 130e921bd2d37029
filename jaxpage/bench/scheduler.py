"""`jaxpage bench scheduler`: what a decode step costs the host, without any device.

Drives a real `LLM` whose runner answers each plan at once. On fast chips this, not the model, is what bounds small
models, so it must stay far below a millisecond.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxpage.bench import results
from jaxpage.bench.host_engine import InstantRunner, make_scheduler
from jaxpage.config import EngineConfig, load_hf_config
from jaxpage.demo import checkpoint
from jaxpage.engine.engine import Engine
from jaxpage.llm import LLM
from jaxpage.plan import StepPlan, StepResult
from jaxpage.runner.buckets import Bucket, StepPrograms
from jaxpage.runner.layout import Layout
from jaxpage.runner.pack import pack, step_layout
from jaxpage.sampling_params import SamplingParams

# Of a step, in their order: the plan; its upload; taking in its result; what `LLM.step` does around the engine.
PARTS = ("schedule", "pack", "update", "outputs")
VOCAB_SIZE = 30_000


@dataclass(frozen=True, kw_only=True)
class SchedulerBench:
    """Measure the host's part of a decode step: schedule, pack, taking in the result, and making outputs."""

    rows: tuple[int, ...] = (32, 64, 256)  # running requests
    context: int = 512  # tokens of each request when measuring begins
    steps: int = 300
    block_size: int = 16
    json: Path | None = None  # all timings go to this file


def main(bench: SchedulerBench) -> None:
    """Measure, print a table, and write all timings to `bench.json` if asked for."""
    report = measure(bench)
    results.publish(report, bench.json, table(report))


def measure(bench: SchedulerBench) -> dict[str, Any]:
    """Microseconds of each part of each step, by rows. Raises ValueError for bad sizes."""
    sizes = (*bench.rows, bench.context - 1, bench.steps, bench.block_size)
    if not bench.rows or min(sizes) < 1:
        raise ValueError(f"sizes must be positive, and the context 2 tokens or more: {bench}")
    found = [{"rows": rows, "microseconds": _measure(rows, bench)} for rows in bench.rows]
    return {"context": bench.context, "block_size": bench.block_size, "results": found}


class _TimedRunner(InstantRunner):
    """Packs each plan as the real runner does, and notes when the parts of a step ended."""

    def __init__(self, programs: StepPrograms, layouts: dict[str, Layout]) -> None:
        super().__init__()
        self.times: list[float] = []
        self._programs, self._layouts = programs, layouts

    def mark(self) -> None:
        self.times.append(time.perf_counter())

    def launch(self, plan: StepPlan) -> StepResult:
        self.mark()
        if not plan.admissions:
            pack(plan, self._programs, self._layouts)
        self.mark()
        return super().launch(plan)

    def collect(self, launched: StepResult, /) -> StepResult:
        self.mark()  # making the result up does not count
        return launched


class _TimedEngine(Engine):
    runner: _TimedRunner

    def step(self) -> Any:
        found = super().step()
        self.runner.mark()
        return found


def _measure(num_rows: int, bench: SchedulerBench) -> dict[str, list[float]]:
    bucket = Bucket(num_rows, num_rows, decode=True)
    layout = step_layout(bucket, block_size=bench.block_size, decode_steps=1)
    runner = _TimedRunner(StepPrograms(bucket, None), {bucket.name: layout})
    llm = _make_llm(num_rows, bench, runner)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    for number in range(num_rows):
        prompt = rng.integers(3, VOCAB_SIZE, bench.context - 1).tolist()
        llm.add_request(str(number), {"prompt_token_ids": prompt}, params)
    llm.step()  # all the prompts
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(bench.steps):
        runner.times.clear()
        runner.mark()
        outputs = llm.step()
        runner.mark()
        assert len(outputs) == num_rows
        start, scheduled, packed, answered, updated, end = runner.times
        seconds = (scheduled - start, packed - scheduled, updated - answered, end - updated)
        for part, value in zip(PARTS, seconds, strict=True):
            times[part].append(value * 1e6)
    return times


def _make_llm(num_rows: int, bench: SchedulerBench, runner: _TimedRunner) -> LLM:
    """With blocks for all requests until measuring ends; one step takes all their prompts."""
    max_model_len = bench.context + bench.steps + 1
    overrides = {"max_position_embeddings": max_model_len}
    config = EngineConfig(model=str(checkpoint()), hf_overrides=overrides, skip_tokenizer_init=True)
    scheduler = make_scheduler(
        num_rows * -(-max_model_len // bench.block_size),
        bench.block_size,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows * bench.context,
        max_model_len=max_model_len,
    )
    hf_config = load_hf_config(config.model, overrides)
    built: Any = SimpleNamespace(
        engine=_TimedEngine(scheduler, runner, overlap=False),
        config=config.resolve(hf_config, platform="cpu"),
        hf_config=hf_config,
        tokenizer=None,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        default_sampling={},
    )
    return LLM.from_built(built)


def table(report: dict[str, Any]) -> str:
    """Median and 90th percentile in microseconds; a launch waits for "schedule + pack", a user for all of it."""
    sums = {"schedule + pack": PARTS[:2], "all": PARTS}
    rows = [["rows", *PARTS, *sums]]
    for result in report["results"]:
        times = dict(result["microseconds"])
        for name, parts in sums.items():
            times[name] = list(map(sum, zip(*(times[part] for part in parts), strict=True)))
        cells = [f"{statistics.median(x):.0f} ({np.percentile(x, 90):.0f})" for x in times.values()]
        rows.append([str(result["rows"]), *cells])
    head = f"context {report['context']}, microseconds: median (p90)"
    return f"{head}\n{results.table(rows, left=0)}"
