"""`jaxpage bench scheduler`: the host cost of a decode step, without any device.

Drives a real `LLM` whose runner answers each plan immediately. On fast chips the host, not the device, is what limits
small models, so its cost must stay far below a millisecond.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxpage.bench import results
from jaxpage.bench.flags import check_least
from jaxpage.bench.host_engine import InstantRunner, make_scheduler
from jaxpage.bench.workloads import random_prompt
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.demo import checkpoint
from jaxpage.engine.engine import Engine
from jaxpage.llm import LLM
from jaxpage.plan import StepPlan, StepResult
from jaxpage.runner.buckets import Bucket, StepPrograms
from jaxpage.runner.layout import Layout
from jaxpage.runner.layouts import step_layout
from jaxpage.runner.pack import pack
from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.tokenizer import load_tokenizer

# Of a step, in order: planning; packing for the upload; processing the result; what `LLM.step` adds to the engine.
PARTS = ("schedule", "pack", "update", "outputs")
IDS = {"detokenize": False}
REQUEST_KINDS: dict[str, dict[str, Any]] = {  # name: options of `SamplingParams`
    "ids": IDS,
    "text": {},
    "text, a stop string": {"stop": ["never to be found"]},
    "ids, 5 logprobs": IDS | {"logprobs": 5},
    "text, 5 logprobs": {"logprobs": 5},
}


@dataclass(frozen=True, kw_only=True)
class SchedulerBench:
    """Measure the host's part of a decode step: schedule, pack, process the result, and make outputs."""

    rows: tuple[int, ...] = (32, 64, 256)  # running requests
    context: int = 512  # tokens of each request when measuring begins
    steps: int = 300
    block_size: int = 16
    requests: bool = False  # a second table, with the most rows, by kind of request
    json: Path | None = None  # all timings go to this file


def main(bench: SchedulerBench) -> None:
    """Measure, print a table, and write all timings to `bench.json` if given."""
    report = measure(bench)
    results.publish(report, bench.json, show(report))


def measure(bench: SchedulerBench) -> dict[str, Any]:
    """Microseconds of each part of each step, by rows. Raises ValueError for bad sizes."""
    check_least(bench, rows=1, context=2, steps=1, block_size=1)
    most = max(bench.rows)
    kinds = RequestOutputKind if bench.requests else ()
    return {
        "context": bench.context,
        "block_size": bench.block_size,
        "results": [{"rows": n, "microseconds": _measure(n, bench, IDS)} for n in bench.rows],
        "requests": [
            {
                "rows": most,
                "output": f"{kind.name}, {name}",
                "microseconds": _measure(most, bench, asked | {"output_kind": kind}),
            }
            for kind in kinds
            for name, asked in REQUEST_KINDS.items()
        ],
    }


class _TimedRunner(InstantRunner):
    """Packs each plan as the real runner does, and records when the parts of a step ended."""

    def __init__(self, programs: StepPrograms, layouts: dict[str, Layout], num_top: int) -> None:
        super().__init__(num_top=num_top)
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
        self.mark()  # making up the result does not count
        return launched


class _TimedEngine(Engine):
    runner: _TimedRunner

    def step(self) -> Any:
        found = super().step()
        self.runner.mark()
        return found


def _measure(num_rows: int, bench: SchedulerBench, asked: dict[str, Any]) -> dict[str, list[float]]:
    bucket = Bucket(num_rows, num_rows, decode=True)
    layout = step_layout(bucket, block_size=bench.block_size, decode_steps=1)
    programs = StepPrograms(bucket, None)
    runner = _TimedRunner(programs, {bucket.name: layout}, asked.get("logprobs", 0))
    llm = _make_llm(num_rows, bench, runner)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, **asked)
    for number in range(num_rows):
        prompt = random_prompt(rng, bench.context - 1, 500)
        llm.add_request(str(number), {"prompt_token_ids": prompt}, params)
    llm.step()  # all the prompts
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(bench.steps):
        runner.times.clear()
        runner.mark()
        llm.step()
        runner.mark()
        start, scheduled, packed, answered, updated, end = runner.times
        seconds = (scheduled - start, packed - scheduled, updated - answered, end - updated)
        for part, value in zip(PARTS, seconds, strict=True):
            times[part].append(value * 1e6)
    assert llm.get_num_unfinished_requests() == num_rows
    return times


def _make_llm(num_rows: int, bench: SchedulerBench, runner: _TimedRunner) -> LLM:
    """An LLM with enough blocks for all requests; one step takes all their prompts."""
    max_model_len = bench.context + bench.steps + 1
    overrides = {"max_position_embeddings": max_model_len}
    config = EngineConfig(model=str(checkpoint()), hf_overrides=overrides)
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
        tokenizer=load_tokenizer(config.model),
        vocab_size=hf_config.vocab_size,
        eos_token_ids=(2,),
        default_sampling={},
        has_recurrent_state=False,
        picture_processor=None,
        adapters=None,
        research=None,
        memory=None,
    )
    return LLM.from_built(built)


def show(report: dict[str, Any]) -> str:
    """Median and 90th percentile in microseconds. "schedule + pack" delays a launch; all of it delays the user."""
    parts = [f"context {report['context']}, microseconds: median (p90)", _table(report["results"])]
    if report["requests"]:
        parts += ["", _table(report["requests"])]
    return "\n".join(parts)


def _table(found: list[dict[str, Any]]) -> str:
    sums = {"schedule + pack": PARTS[:2], "all": PARTS}
    rows = [[*list(found[0])[:-1], *PARTS, *sums]]
    for result in found:
        times = dict(result["microseconds"])
        for name, parts in sums.items():
            times[name] = list(map(sum, zip(*(times[part] for part in parts), strict=True)))
        cells = [f"{statistics.median(x):.0f} ({np.percentile(x, 90):.0f})" for x in times.values()]
        rows.append([*map(str, list(result.values())[:-1]), *cells])
    return results.table(rows, left=0)
