"""`jaxpage bench latency`: how long one batch takes, from its first input token to its last output token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxpage.bench import results
from jaxpage.bench.engines import run_llm
from jaxpage.bench.flags import check_least
from jaxpage.bench.offline import Shape, checkpoint, machine
from jaxpage.bench.workloads import equal_requests
from jaxpage.engine.stats import EngineStats
from jaxpage.flags import EngineFlags, given_options

PERCENTAGES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True)
class LatencyBench:
    """Time a batch of requests repeatedly, greedily and without a prefix cache."""

    input_len: int = 32  # tokens of each prompt
    output_len: int = 128  # tokens of each answer
    batch_size: int = 8
    num_iters_warmup: int = 10
    num_iters: int = 30
    shape: Shape = "qwen2.5-0.5b"  # random weights of this shape
    model: Path | None = None  # a checkpoint folder, instead of a shape
    json: Path | None = None  # all times go to this file
    engine: EngineFlags = field(default_factory=EngineFlags)  # `seed` is also that of the prompts


def main(bench: LatencyBench) -> None:
    """Measure, print percentiles, and write all times to `bench.json` if given."""
    report = measure(bench)
    results.publish(report, bench.json, show(report))


def measure(bench: LatencyBench) -> dict[str, Any]:
    """Seconds of each iteration and their percentiles, under vLLM's names. Raises ValueError for bad sizes."""
    check_least(bench, input_len=1, output_len=1, batch_size=1, num_iters_warmup=0, num_iters=1)
    folder, config = checkpoint(bench.shape, bench.model)
    from jaxpage.llm import LLM
    from jaxpage.sampling_params import SamplingParams

    options = {
        "max_model_len": bench.input_len + bench.output_len,
        "max_num_seqs": bench.batch_size,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    } | given_options(bench.engine)
    llm = LLM(str(folder), **options)
    llm.wait_until_warm()
    sizes = bench.batch_size, bench.input_len, bench.output_len, config["vocab_size"]
    work = equal_requests(random.Random(bench.engine.seed), *sizes)
    rounds = range(bench.num_iters_warmup + bench.num_iters)
    taken = [run_llm(llm, SamplingParams, work)[0] for _ in tqdm(rounds, disable=None)]
    latencies = taken[bench.num_iters_warmup :]
    percentiles = np.percentile(latencies, PERCENTAGES).tolist()
    return {
        "avg_latency": float(np.mean(latencies)),
        "std_latency": float(np.std(latencies)),
        "latencies": latencies,
        "percentiles": dict(zip(map(str, PERCENTAGES), percentiles, strict=True)),
        "drafts": _drafts(llm.stats()) if bench.engine.speculative_config else None,
        "model": str(folder),
        "options": options,
        "machine": machine(),
    }


def _drafts(stats: EngineStats) -> dict[str, int]:
    return {"num_tokens": stats.num_draft_tokens, "num_accepted": stats.num_accepted_tokens}


def show(report: dict[str, Any]) -> str:
    """The lines that vLLM prints, and with `speculative_config` how many drafts were right."""
    lines = [f"Avg latency: {report['avg_latency']:.4f} seconds"]
    lines.append(f"Std latency: {report['std_latency']:.4f} seconds")
    for percentage, seconds in report["percentiles"].items():
        lines.append(f"{percentage}% percentile latency: {seconds:.4f} seconds")
    if drafts := report.get("drafts"):
        lines.append(f"Accepted drafts: {drafts['num_accepted']} of {drafts['num_tokens']} tokens")
    return "\n".join(lines)
