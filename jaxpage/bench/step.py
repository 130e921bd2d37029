"""`jaxpage bench step`: where the time of a decode step goes, by part of the model.

Profiles a few launches with jax's profiler and adds up the operations by their names in the compiled program.
"""

from __future__ import annotations

import collections
import gzip
import json
import random
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpage import LLM, SamplingParams
from jaxpage.aot.hlo import parse
from jaxpage.bench import results
from jaxpage.bench.flags import check_least
from jaxpage.bench.offline import Shape, checkpoint
from jaxpage.bench.workloads import random_prompt

PARTS = {  # part: pattern of its operations' names; the first match counts
    "attention": r"paged_attention",
    "KV write": r"write_kv",
    "sampling": r"jit\(sample\)",
    "matrix products": r"dot_general",
}
OTHER = "norms, activations, the rest"
NUM_STEPS = 8  # per launch
_CONTAINERS = re.compile(r"while|cond|call")  # their time is that of their content
_TIMED_LAUNCHES, _TRACED_LAUNCHES = 3, 2


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """Show where the time of a decode step goes."""

    batch: tuple[int, ...] = (1, 8, 32)
    context: int = 256  # tokens of each request when measuring begins
    shape: Shape = "qwen2.5-0.5b"  # random weights of this shape
    model: Path | None = None  # a checkpoint folder, instead of a shape
    quantization: str | None = None
    json: Path | None = None  # all figures go to this file


def main(bench: StepBench) -> None:
    """Measure, print a table, and write all figures to `bench.json` if given."""
    report = measure(bench)
    results.publish(report, bench.json, table(report))


def measure(bench: StepBench) -> dict[str, Any]:
    """Milliseconds of a step and of its parts, by batch. Raises ValueError for bad sizes."""
    check_least(bench, batch=1, context=2)
    folder, _ = checkpoint(bench.shape, bench.model)
    llm = LLM(
        str(folder),
        max_model_len=bench.context + 16 * NUM_STEPS,
        max_num_seqs=max(bench.batch),
        decode_steps=NUM_STEPS,
        enable_prefix_caching=False,
        async_scheduling=False,  # a launch is one step of the engine
        quantization=bench.quantization,
        skip_tokenizer_init=True,
        enforce_eager=True,  # compile only what is measured
    )
    found = [_measure(llm, batch, bench.context) for batch in bench.batch]
    return {"context": bench.context, "quantization": bench.quantization, "results": found}


def _measure(llm: LLM, batch: int, context: int) -> dict[str, Any]:
    rng = random.Random(batch)
    params = SamplingParams(temperature=0, max_tokens=15 * NUM_STEPS, ignore_eos=True)
    names = [f"{batch}-{number}" for number in range(batch)]
    for name in names:
        prompt = random_prompt(rng, context, 500)
        llm.add_request(name, {"prompt_token_ids": prompt}, params)
    waiting = set(names)
    while waiting:  # for their first tokens
        waiting -= {output.request_id for output in llm.step()}
    for _ in range(2):  # the first of these launches compiles
        llm.step()
    seconds = []
    for _ in range(_TIMED_LAUNCHES):
        start = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_TRACED_LAUNCHES):
                llm.step()
        micros = operations(Path(folder))
    llm.abort_request(names)
    name = f"decode R={max(2, 1 << (batch - 1).bit_length())}"
    (text,) = (p.executable.as_text() for p in llm.programs() if p.name == name and p.executable)
    steps = NUM_STEPS * _TRACED_LAUNCHES
    parts = {part: total / 1e3 / steps for part, total in by_part(micros, text or "").items()}
    return {"batch": batch, "step": statistics.median(seconds) * 1e3 / NUM_STEPS, "parts": parts}


def operations(folder: Path) -> dict[str, float]:
    """Microseconds of each operation in the profile under `folder`, summed over its executions."""
    (path,) = folder.rglob("*.trace.json.gz")
    micros: dict[str, float] = collections.defaultdict(float)
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            micros[event["name"]] += event["dur"]
    return micros


def by_part(micros: dict[str, float], program: str) -> dict[str, float]:
    """`micros` of operations summed by PARTS, according to the metadata in the text of the compiled `program`."""
    names = {each.name: each.op_name for each in parse(program)}
    totals = dict.fromkeys([*PARTS, OTHER], 0.0)
    for operation, total in micros.items():
        if not _CONTAINERS.match(operation):
            name = names.get(operation, "")
            fitting = (part for part, pattern in PARTS.items() if re.search(pattern, name))
            totals[next(fitting, OTHER)] += total
    return totals


def table(report: dict[str, Any]) -> str:
    """A line for each batch, with the parts of a step in milliseconds."""
    rows = [["batch", "ms/step", *report["results"][0]["parts"]]]
    for found in report["results"]:
        figures = (found["step"], *found["parts"].values())
        rows.append([str(found["batch"]), *(f"{x:.1f}" for x in figures)])
    return results.table(rows, left=0)
