"""`jaxpage bench memory`: how much KV memory is wasted, how many tokens a GiB holds, what the prefix cache costs.

Most of it needs no model: the engine's scheduler runs the mixed workload, and each plan is answered immediately.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxpage.bench import results
from jaxpage.bench.engines import Work, run_llm
from jaxpage.bench.flags import check_above_zero, check_least
from jaxpage.bench.host_engine import make_scheduler, run
from jaxpage.bench.offline import Shape, checkpoint
from jaxpage.bench.workloads import MAX_NUM_SEQS, run_interleaved, workloads
from jaxpage.engine.scheduler import Scheduler
from jaxpage.kv_groups import Windows, group_layers, most_blocks
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.plan import StepPlan
from jaxpage.sampling_params import SamplingParams
from pallas_kernels.kv_write.quantized import FORMATS

LIMITS: dict[str, Any] = {  # the workload's, and a CPU's default
    "max_model_len": 1024,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 2048,
}
GEMMA = (1024,) * 5 + (None,)  # windows of Gemma 3's layers, repeated
LONG = 32_768  # tokens of a sequence that outgrows them
VOCAB_SIZE = 30_000  # without a model
MODELS = {  # for tokens per GiB: layers, KV heads, head_dim
    "Qwen2.5-0.5B": (24, 2, 64),
    "Qwen2.5-7B": (28, 4, 128),
}
Runner = Callable[[Work], float]


@dataclass(frozen=True, kw_only=True)
class MemoryBench:
    """Measure waste of KV memory, tokens that a GiB holds, and the cost of the prefix cache when it never hits."""

    block_size: int = 16
    decode_steps: tuple[int, ...] = (1, 8)  # waste is measured with each
    rounds: int = 5  # with and without prefix cache, interleaved, after an uncounted one
    scale: float = 1.0  # of prompt and output lengths and the number of requests
    seed: int = 0
    # also measure the prefix cache's cost in whole engines, with random weights of this shape
    shape: Shape | None = None
    json: Path | None = None  # all figures go to this file


def main(bench: MemoryBench) -> None:
    """Measure, print, and write all figures to `bench.json` if given."""
    report = measure(bench)
    results.publish(report, bench.json, show(report))


def measure(bench: MemoryBench) -> dict[str, Any]:
    """Everything that is printed, and each round's seconds. Raises ValueError for bad sizes."""
    check_least(bench, block_size=1, decode_steps=1, rounds=1)
    check_above_zero(bench, "scale")
    work = _mixed(bench, VOCAB_SIZE, 0)
    wastes = [waste(work, bench.block_size, steps) for steps in bench.decode_steps]
    half = max(found["num_blocks"] for found in wastes) // 2
    wastes.append(waste(work, bench.block_size, max(bench.decode_steps), half))
    report: dict[str, Any] = {
        "block_size": bench.block_size,
        "num_requests": len(work.prompts),
        "num_tokens": _num_tokens(work),
        "waste": wastes,
        "windows": {
            "without": blocks_of_long_sequence((None,) * len(GEMMA), bench.block_size),
            "with": blocks_of_long_sequence(GEMMA, bench.block_size),
        },
        "tokens_per_gib": {
            name: tokens_per_gib(model, bench.block_size) for name, model in MODELS.items()
        },
        "host_seconds": _seconds(
            bench, VOCAB_SIZE, partial(_host, bench, True), partial(_host, bench, False)
        ),
    }
    if bench.shape is not None:
        folder, config = checkpoint(bench.shape)
        report["shape"] = bench.shape
        on, off = (_engine(folder, bench, cached) for cached in (True, False))
        report["engine_seconds"] = _seconds(bench, config["vocab_size"], on, off)
    return report


def waste(
    work: Work, block_size: int, decode_steps: int, num_blocks: int | None = None
) -> dict[str, Any]:
    """Shares of the allocated slots without KV, 0 to 1: "mean", "max", and the mean by cause.

    Each decode step of a launch counts as a step. "mean_of_launches" is the figure of `llm.stats()`, which is taken
    when a launch begins. The pool has `num_blocks` (None: more than the work can fill); "num_blocks" in the result is
    the most that sequences held.
    """
    scheduler = _scheduler(block_size, decode_steps=decode_steps, num_blocks=num_blocks)
    slots: list[tuple[int, int, int]] = []
    held: list[int] = []

    def look(plan: StepPlan) -> None:
        held.append(scheduler.kv.pool.num_used)
        slots.extend(_account(scheduler, plan, step) for step in range(plan.num_steps))

    stats = run(scheduler, work, look).stats()
    allocated, partial, ahead = map(sum, zip(*slots, strict=True))
    causes = {"partial": partial / allocated, "ahead": ahead / allocated}
    return {
        "decode_steps": decode_steps,
        "mean": sum(causes.values()),
        "max": max((partial + ahead) / allocated for allocated, partial, ahead in slots),
        "causes": causes,
        "mean_of_launches": stats.mean_kv_waste,
        "num_launches": stats.num_steps,
        "num_blocks": max(held),
        "scarce": num_blocks is not None,
    }


def _account(scheduler: Scheduler, plan: StepPlan, step: int) -> tuple[int, int, int]:
    """Slots at one step of a launch: allocated; and of these, empty in blocks with KV, and empty in blocks without.

    Summed over sequences, none of which share a block here.
    """
    size = scheduler.kv.pool.block_size
    rows = zip(plan.slots, plan.starts, plan.num_tokens, strict=True)
    ends = {slot: start + count + step for slot, start, count in rows}
    allocated = partial = ahead = 0
    for sequence in scheduler.running:
        end = ends.get(sequence.slot, sequence.num_computed_tokens)
        used = min(end, sequence.max_len - 1)
        begun, held = -(-used // size), len(sequence.block_tables[0])
        allocated += held * size
        partial += begun * size - used
        ahead += (held - begun) * size
    return allocated, partial, ahead


def blocks_of_long_sequence(layers: Windows, block_size: int) -> int:
    """The most blocks, of one layer each, that a sequence of LONG tokens holds during prefill and decode.

    `layers`: the windows of a few layers. Counted in a pool with just enough blocks.
    """
    groups = group_layers(layers, LONG + 1)
    limits: dict[str, Any] = LIMITS | {"max_num_seqs": 1, "max_model_len": LONG}
    num_blocks = most_blocks(groups.windows, LONG, block_size, limits["max_num_batched_tokens"])
    scheduler = make_scheduler(num_blocks, block_size, windows=groups.windows, **limits)
    held = []
    work = Work(prompts=[[1] * (LONG - 64)], num_tokens=[64], static_batch=1)
    run(scheduler, work, lambda plan: held.append(scheduler.kv.pool.num_used))
    return max(held) * groups.num_arrays


def tokens_per_gib(model: tuple[int, int, int], block_size: int) -> dict[str, int]:
    """Tokens by KV dtype, from the bytes of a block."""
    num_layers, num_kv_heads, head_dim = model
    found = {}
    for format in (None, *FORMATS):
        spec = KVPoolSpec(
            num_arrays=num_layers,
            num_blocks=2,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=jnp.dtype(jnp.bfloat16),
            format=format,
        )
        found[format or "bfloat16"] = 2**30 * block_size // spec.bytes_per_block
    return found


def _scheduler(block_size: int, *, num_blocks: int | None = None, **options: Any) -> Scheduler:
    """By default with blocks for all: without evictions most hashes are kept, which is the most expensive case."""
    most = MAX_NUM_SEQS * -(-LIMITS["max_model_len"] // block_size)
    return make_scheduler(num_blocks or most, block_size, **LIMITS, **options)


def _mixed(bench: MemoryBench, vocab_size: int, number: int) -> Work:
    mixed = workloads(vocab_size, bench.scale)["mixed"]
    (work,) = mixed.make(random.Random(f"{bench.seed} mixed {number}"))
    return work


def _num_tokens(work: Work) -> int:
    return sum(map(len, work.prompts)) + work.num_output_tokens


def _host(bench: MemoryBench, cached: bool, work: Work) -> float:
    """Seconds that a scheduler takes for `work`, without a model."""
    options = {"decode_steps": max(bench.decode_steps), "enable_prefix_caching": cached}
    scheduler = _scheduler(bench.block_size, **options)
    start = time.perf_counter()
    run(scheduler, work)
    return time.perf_counter() - start


def _engine(folder: Path, bench: MemoryBench, cached: bool) -> Runner:
    """A function that returns the seconds an engine takes for work. The engine is created and warmed up first."""
    from jaxpage import LLM

    llm = LLM(
        str(folder),
        **LIMITS,
        block_size=bench.block_size,
        decode_steps=max(bench.decode_steps),
        enable_prefix_caching=cached,
        skip_tokenizer_init=True,
    )
    llm.wait_until_warm()
    return lambda work: run_llm(llm, SamplingParams, work)[0]


def _seconds(bench: MemoryBench, vocab_size: int, on: Runner, off: Runner) -> dict[str, list[Any]]:
    """Seconds of each round with ("on") and without ("off") prefix cache, on work that is new in each round."""
    works = [_mixed(bench, vocab_size, number) for number in range(bench.rounds + 1)]
    taken = run_interleaved({"on": on, "off": off}, [[work] for work in works])
    seconds = {name: [seconds for [seconds] in rounds] for name, rounds in taken.items()}
    return seconds | {"num_tokens": list(map(_num_tokens, works[1:]))}


def overhead(seconds: dict[str, Any]) -> dict[str, float]:
    """Medians over the rounds: microseconds per token with and without, and by how much "on" is slower, 0 to 1."""
    rounds = list(zip(seconds["on"], seconds["off"], seconds["num_tokens"], strict=True))
    return {
        "on": statistics.median(1e6 * on / tokens for on, _, tokens in rounds),
        "off": statistics.median(1e6 * off / tokens for _, off, tokens in rounds),
        "slower": statistics.median(on / off - 1 for on, off, _ in rounds),
    }


def show(report: dict[str, Any]) -> str:
    """Everything that is printed."""
    rows = [["decode_steps", "mean", "max", "last blocks", "blocks ahead", "launches", ""]]
    for found in report["waste"]:
        shares = (found["mean"], found["max"], *found["causes"].values(), found["mean_of_launches"])
        note = f"in half as many blocks, {found['num_blocks']}" if found["scarce"] else ""
        rows.append([str(found["decode_steps"]), *(f"{100 * x:.2f}" for x in shares), note])
    capacities = [
        f"{model}: "
        + ", ".join(f"{k} {n} ({n / found['bfloat16']:.2f}x)" for k, n in found.items())
        for model, found in report["tokens_per_gib"].items()
    ]
    without, with_windows = report["windows"]["without"], report["windows"]["with"]
    cost = overhead(report["host_seconds"])
    extra = cost["on"] - cost["off"]
    lines = [
        f"mixed workload, {report['num_requests']} requests, {report['num_tokens']} tokens, "
        f"block_size {report['block_size']}",
        "",
        "allocated slots without KV, % of all: mean over decode steps, maximum, mean by cause; "
        "and the mean when launches begin",
        results.table(rows, left=0),
        "",
        "tokens that a GiB holds, and the ratio to bfloat16:",
        *capacities,
        "",
        f"in six layers a sequence of {LONG} tokens holds {without} blocks if all see everything, "
        f"{with_windows} ({without / with_windows:.1f}x fewer) if five see {GEMMA[0]} tokens "
        "(Gemma 3)",
        "",
        "prefix cache that never hits:",
        f"host alone: {cost['on']:.2f} us a token with it, {cost['off']:.2f} without: {extra:+.2f}, "
        f"1 % of the throughput where a token takes {100 * max(extra, 0):.0f} us",
    ]
    if "engine_seconds" in report:
        cost = overhead(report["engine_seconds"])
        lines.append(
            f"engine, {report['shape']}: {cost['on']:.1f} us a token with it, {cost['off']:.1f} "
            f"without: {100 * cost['slower']:+.2f} % of the time (median of rounds)"
        )
    return "\n".join(lines)
