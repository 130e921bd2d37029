"""`jaxpage bench memory`: how much of the KV memory is waste, what a GiB of it holds, what the prefix cache costs.

Drives the engine's own `Scheduler` through the mixed workload; a stand-in answers each plan at once, so this takes
seconds. With a `shape` the same work goes through whole engines too. Must not know how any of them works inside.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxpage.bench.offline import OfflineBench, checkpoint
from jaxpage.bench.peers import Work
from jaxpage.bench.scheduler import answer
from jaxpage.bench.workloads import MAX_NUM_SEQS, workloads
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine.stats import engine_stats
from jaxpage.kv_groups import Windows, group_layers, most_blocks
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.request import Request
from jaxpage.sampling_params import SamplingParams
from pallas_kernels.kv_write.quantized import FORMATS

MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS = 1024, 2048  # the workload's, and the default on a CPU
GEMMA = (1024,) * 5 + (None,)  # windows of Gemma 3's layers, again and again
LONG = 32_768  # tokens of a sequence that outgrows them
MODELS = {  # whose keys and values fill the GiB: layers, KV heads, head_dim
    "Qwen2.5-0.5B": (24, 2, 64),
    "Qwen2.5-7B": (28, 4, 128),
}


@dataclass(frozen=True, kw_only=True)
class MemoryBench:
    """Measure waste of KV memory, tokens that a GiB holds, and the cost of the prefix cache when it never hits."""

    block_size: int = 16
    decode_steps: tuple[int, ...] = (1, 8)  # waste with each of them
    rounds: int = 5  # with and without prefix cache, in turns, after one that does not count
    scale: float = 1.0  # of prompt and output lengths and the number of requests
    seed: int = 0
    # random weights of this shape: the prefix cache's cost in whole engines too
    shape: Literal["tiny", "qwen2.5-0.5b"] | None = None
    json: Path | None = None  # all figures go to this file


def main(bench: MemoryBench) -> None:
    """Measure, print, and write all figures to `bench.json` if asked for."""
    report = measure(bench)
    if bench.json is not None:
        bench.json.write_text(json.dumps(report, indent=1) + "\n")
    print(show(report))


def measure(bench: MemoryBench) -> dict[str, Any]:
    """Everything that is printed, and each round's seconds. Raises ValueError for bad sizes."""
    sizes = (*bench.decode_steps, bench.block_size, bench.rounds)
    if not bench.decode_steps or min(sizes) < 1 or bench.scale <= 0:
        raise ValueError(f"sizes, rounds and scale must be positive: {bench}")
    work = _mixed(bench, vocab_size=30000, number=0)
    wastes = [waste(work, bench.block_size, steps) for steps in bench.decode_steps]
    half = max(found["num_blocks"] for found in wastes) // 2
    wastes.append(waste(work, bench.block_size, max(bench.decode_steps), 1 + half))
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
        "host_seconds": _in_turns(bench, _run_scheduler(bench), vocab_size=30000),
    }
    if bench.shape is not None:
        report["shape"] = bench.shape
        run, vocab_size = _run_engine(bench)
        report["engine_seconds"] = _in_turns(bench, run, vocab_size)
    return report


def waste(
    work: Work, block_size: int, decode_steps: int, num_blocks: int | None = None
) -> dict[str, Any]:
    """Shares of the allocated slots without KV, 0 to 1: "mean", "max", and the mean by cause.

    Each decode step of a launch counts as a step. "mean_of_launches" is what `llm.stats()` says, which looks when a
    launch begins. The pool has `num_blocks` (None: more than the work can fill); "num_blocks" is how many sequences
    held at most.
    """
    scheduler = _scheduler(
        block_size, decode_steps, enable_prefix_caching=True, num_blocks=num_blocks
    )
    totals, largest, most = Counter[str](), 0.0, 0

    def look(scheduled: ScheduledStep) -> None:
        nonlocal largest, most
        most = max(most, scheduler.kv.pool.num_used)
        for step in range(scheduled.plan.num_steps):
            found = _account(scheduler, scheduled, step)
            totals.update(found)
            largest = max(largest, (found["partial"] + found["ahead"]) / found["allocated"])

    run(scheduler, work, look)
    causes = {cause: totals[cause] / totals["allocated"] for cause in ("partial", "ahead")}
    stats = engine_stats(scheduler, 0)
    return {
        "decode_steps": decode_steps,
        "mean": sum(causes.values()),
        "max": largest,
        "causes": causes,
        "mean_of_launches": stats.mean_kv_waste,
        "num_launches": stats.num_steps,
        "num_blocks": most,
        "scarce": num_blocks is not None,
    }


def _account(scheduler: Scheduler, scheduled: ScheduledStep, step: int) -> dict[str, int]:
    """Slots at one step of a launch: allocated; of them free in blocks that have KV, and in blocks that have none yet.

    Sequence by sequence, as none shares a block with another here.
    """
    size = scheduler.kv.pool.block_size
    plan = scheduled.plan
    rows = zip(scheduled.sequences, plan.starts, plan.num_tokens, strict=True)
    ends = {id(sequence): start + count + step for sequence, start, count in rows}
    found = {"allocated": 0, "partial": 0, "ahead": 0}
    for sequence in scheduler.running:
        used = min(ends.get(id(sequence), sequence.num_computed_tokens), sequence.max_len - 1)
        begun, held = -(-used // size), len(sequence.block_tables[0])
        found["allocated"] += held * size
        found["partial"] += begun * size - used
        found["ahead"] += (held - begun) * size
    return found


def blocks_of_long_sequence(layers: Windows, block_size: int) -> int:
    """Blocks, of one layer each, that a sequence of LONG tokens holds at most while it is computed and decoded.

    `layers`: the windows of a few layers. Counted in a pool that has just enough blocks.
    """
    groups = group_layers(layers, LONG + 1)
    num_blocks = 1 + most_blocks(groups.windows, LONG, block_size, MAX_NUM_BATCHED_TOKENS)
    kv = KVCache(num_blocks, block_size, enable_prefix_caching=True, windows=groups.windows)
    scheduler = Scheduler(
        kv,
        max_num_seqs=1,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=LONG,
    )
    most = 0

    def look(scheduled: ScheduledStep) -> None:
        nonlocal most
        most = max(most, kv.pool.num_used)

    run(scheduler, Work(prompts=[[1] * (LONG - 64)], num_tokens=[64], static_batch=1), look)
    return most * groups.num_arrays


def tokens_per_gib(model: tuple[int, int, int], block_size: int) -> dict[str, int]:
    """By KV dtype, from the bytes of a pool that is allocated for it."""
    num_layers, num_kv_heads, head_dim = model
    num_blocks = 8
    found = {}
    for format in (None, *FORMATS):
        spec = KVPoolSpec(
            num_arrays=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=jnp.dtype(jnp.bfloat16),
            format=format,
        )
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(spec.allocate()))
        found[format or "bfloat16"] = 2**30 * num_blocks * block_size // num_bytes
    return found


def run(
    scheduler: Scheduler, work: Work, look: Callable[[ScheduledStep], None] | None = None
) -> None:
    """All of the work, each plan answered at once; `look` sees each step before it is."""
    for number, (prompt, count) in enumerate(zip(work.prompts, work.num_tokens, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        scheduler.add(
            Request(request_id=str(number), prompt_token_ids=prompt, params=params, seed=0)
        )
    while scheduler.requests:
        step = scheduler.schedule()
        assert step is not None
        if look is not None:
            look(step)
        scheduler.update(step, answer(step.plan))


def _scheduler(
    block_size: int,
    decode_steps: int,
    *,
    enable_prefix_caching: bool,
    num_blocks: int | None = None,
) -> Scheduler:
    """With blocks for all unless told: that none is ever evicted keeps most hashes, which is the dearest case."""
    num_blocks = num_blocks or 1 + MAX_NUM_SEQS * -(-MAX_MODEL_LEN // block_size)
    kv = KVCache(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    return Scheduler(
        kv,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        decode_steps=decode_steps,
    )


def _mixed(bench: MemoryBench, vocab_size: int, number: int) -> Work:
    (workload,) = (w for w in workloads(vocab_size, bench.scale) if w.name == "mixed")
    (work,) = workload.make(random.Random(f"{bench.seed} mixed {number}"))
    return work


def _num_tokens(work: Work) -> int:
    return sum(map(len, work.prompts)) + sum(work.num_tokens)


def _run_scheduler(bench: MemoryBench) -> Callable[[Work, bool], None]:
    decode_steps = max(bench.decode_steps)

    def run_one(work: Work, cached: bool) -> None:
        run(_scheduler(bench.block_size, decode_steps, enable_prefix_caching=cached), work)

    return run_one


def _run_engine(bench: MemoryBench) -> tuple[Callable[[Work, bool], None], int]:
    """A function that answers work with one of two engines, and the vocabulary of their model."""
    from jaxpage import LLM

    assert bench.shape is not None
    folder, config = checkpoint(OfflineBench(shape=bench.shape))
    llms = {
        cached: LLM(
            str(folder),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            block_size=bench.block_size,
            decode_steps=max(bench.decode_steps),
            enable_prefix_caching=cached,
            skip_tokenizer_init=True,
        )
        for cached in (True, False)
    }
    for llm in llms.values():
        llm.wait_until_warm()

    def run_one(work: Work, cached: bool) -> None:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in work.num_tokens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        llms[cached].generate(prompts, params, use_tqdm=False)

    return run_one, config["vocab_size"]


def _in_turns(
    bench: MemoryBench, run_one: Callable[[Work, bool], None], vocab_size: int
) -> dict[str, Any]:
    """Seconds of each round with ("on") and without ("off") prefix cache, on work that no round has seen before."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    num_tokens = []
    for number in range(bench.rounds + 1):
        work = _mixed(bench, vocab_size, number)
        # Each goes first in every other round: what the first leaves warm helps the second.
        for name in ("on", "off") if number % 2 else ("off", "on"):
            start = time.perf_counter()
            run_one(work, name == "on")
            if number:
                seconds[name].append(time.perf_counter() - start)
        if number:
            num_tokens.append(_num_tokens(work))
    return {**seconds, "num_tokens": num_tokens}


def overhead(seconds: dict[str, Any]) -> dict[str, float]:
    """Medians over the rounds: microseconds a token with and without, and by how much "on" is slower, 0 to 1."""
    rounds = list(zip(seconds["on"], seconds["off"], seconds["num_tokens"], strict=True))
    return {
        "on": statistics.median(1e6 * on / tokens for on, _, tokens in rounds),
        "off": statistics.median(1e6 * off / tokens for _, off, tokens in rounds),
        "slower": statistics.median(on / off - 1 for on, off, _ in rounds),
    }


def show(report: dict[str, Any]) -> str:
    """Everything that is printed."""
    lines = [
        f"mixed workload, {report['num_requests']} requests, {report['num_tokens']} tokens, "
        f"block_size {report['block_size']}",
        "",
        "allocated slots without KV, % of all: mean over decode steps, largest, mean by cause; "
        "and the mean when launches begin",
        f"{'decode_steps':>12}{'mean':>8}{'max':>8}{'last blocks':>14}{'blocks ahead':>14}{'launches':>10}",
    ]
    for found in report["waste"]:
        if found["scarce"]:
            lines.append(f"in a pool of half as many blocks as that held, {found['num_blocks']}:")
        shares = (found["mean"], found["max"], *found["causes"].values(), found["mean_of_launches"])
        cells = [
            f"{100 * x:>{width}.2f}" for x, width in zip(shares, (8, 8, 14, 14, 10), strict=True)
        ]
        lines.append(f"{found['decode_steps']:>12}" + "".join(cells))
    lines += ["", "tokens that a GiB holds, and how many times as many as in bfloat16:"]
    for model, found in report["tokens_per_gib"].items():
        cells = [f"{name} {n} ({n / found['bfloat16']:.2f}x)" for name, n in found.items()]
        lines.append(f"{model}: {', '.join(cells)}")
    windows = report["windows"]
    lines += [
        "",
        f"of six layers a sequence of {LONG} tokens holds {windows['without']} blocks if all see everything, "
        f"{windows['with']} ({windows['without'] / windows['with']:.1f}x fewer) "
        f"if five see {GEMMA[0]} tokens (Gemma 3)",
    ]
    cost = overhead(report["host_seconds"])
    extra = cost["on"] - cost["off"]
    lines += [
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
