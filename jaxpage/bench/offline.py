"""`jaxpage bench offline`: the same offline work through jaxpage and other engines, in turns.

Knows the workloads, the order of measurements and what is reported; how an engine is driven is
in `peers.py`. One engine works at a time, rounds alternate between them, and medians are
compared, so a slow minute of the machine falls on all of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxpage import tiny
from jaxpage.bench.peers import Options, PeerProcess, Work

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64

QWEN25_05B: dict[str, Any] = tiny.TINY_CONFIG | {
    "vocab_size": 19000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SHAPES = {"tiny": tiny.TINY_CONFIG, "qwen2.5-0.5b": QWEN25_05B}
FAMILIES = {"transformers": ("transformers-generate", "transformers-continuous")}


@dataclass(frozen=True, kw_only=True)
class OfflineBench:
    """Compare offline throughput with other engines, in bfloat16, greedily."""

    compare: tuple[Literal["transformers"], ...] = ()  # engines besides jaxpage
    shape: Literal["tiny", "qwen2.5-0.5b"] = "qwen2.5-0.5b"  # random weights of this shape
    model: Path | None = None  # a checkpoint folder, instead of a shape
    workloads: tuple[str, ...] = ()  # names, all of them if none is given
    rounds: int = 5  # counted rounds, after one that is not
    scale: float = 1.0  # of prompt and output lengths, steps and the number of requests
    threads: int = 2
    seed: int = 0
    cache_dir: Path = Path("~/.cache/jaxpage/bench")  # where checkpoints of a shape are kept
    json: Path | None = None  # all timings, versions and the machine go to this file


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Something to measure. One round runs the list of works that `make` draws, one by one."""

    name: str
    unit: str
    make: Callable[[random.Random], list[Work]]
    value: Callable[[list[Work], list[float]], float]  # from the seconds of each work
    less_is_better: bool = False
    prefix_caching: bool = False

    def speedup(self, ours: float, theirs: float) -> float:
        """How many times as fast as theirs ours is."""
        return theirs / ours if self.less_is_better else ours / theirs


def workloads(vocab_size: int, scale: float) -> list[Workload]:
    """All workloads; token ids below 3 are left to special tokens."""

    def scaled(number: int) -> int:
        return max(1, round(number * scale))

    def prompt(rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(length)]

    def log_uniform(rng: random.Random, low: int, high: int) -> int:
        return scaled(round(math.exp(rng.uniform(math.log(low), math.log(high)))))

    def alike(rng: random.Random, batch: int, num_tokens: int) -> Work:
        prompts = [prompt(rng, scaled(256)) for _ in range(batch)]
        return Work(prompts=prompts, num_tokens=[num_tokens] * batch, static_batch=batch)

    def decode(batch: int) -> Workload:
        """The difference of two runs leaves the decode steps alone."""
        num_steps = max(2, scaled(32))
        return Workload(
            name=f"decode-{batch}",
            unit="ms/step",
            less_is_better=True,
            make=lambda rng: [alike(rng, batch, 1), alike(rng, batch, 1 + num_steps)],
            value=lambda works, seconds: (seconds[1] - seconds[0]) / num_steps * 1e3,
        )

    def mixed(rng: random.Random) -> list[Work]:
        num_requests = scaled(64)
        prompts = [prompt(rng, log_uniform(rng, 16, 512)) for _ in range(num_requests)]
        num_tokens = [log_uniform(rng, 8, 256) for _ in range(num_requests)]
        return [Work(prompts=prompts, num_tokens=num_tokens, static_batch=8)]

    def shared_prefix(rng: random.Random) -> list[Work]:
        num_requests, prefix = scaled(32), prompt(rng, scaled(512))
        prompts = [prefix + prompt(rng, scaled(32)) for _ in range(num_requests)]
        return [Work(prompts=prompts, num_tokens=[scaled(16)] * num_requests, static_batch=8)]

    return [
        *(decode(batch) for batch in (1, 8, 32)),
        Workload(
            name="prefill-8",
            unit="prompt tokens/s",
            make=lambda rng: [alike(rng, 8, 1)],
            value=lambda works, seconds: sum(map(len, works[0].prompts)) / seconds[0],
        ),
        Workload(name="mixed", unit="output tokens/s", make=mixed, value=_output_rate),
        Workload(
            name="shared-prefix",
            unit="output tokens/s",
            make=shared_prefix,
            value=_output_rate,
            prefix_caching=True,
        ),
    ]


def _output_rate(works: list[Work], seconds: list[float]) -> float:
    return sum(works[0].num_tokens) / seconds[0]


def main(bench: OfflineBench) -> None:
    """Measure, print a table, and write all timings to `bench.json` if asked for."""
    names = ["jaxpage", *(peer for family in bench.compare for peer in FAMILIES[family])]
    report = measure(bench, names)
    if bench.json is not None:
        bench.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


def measure(bench: OfflineBench, peers: list[str]) -> dict[str, Any]:
    """Run the workloads through each of the named peers and return everything that was seen.

    Raises ValueError for an unknown workload or peer, RuntimeError if a peer fails.
    """
    folder, config = checkpoint(bench)
    known = workloads(config["vocab_size"], bench.scale)
    chosen = bench.workloads or tuple(w.name for w in known)
    if unknown := set(chosen) - {w.name for w in known}:
        raise ValueError(f"no workload {unknown}; there are {[w.name for w in known]}")
    if bench.rounds < 1 or bench.scale <= 0:
        raise ValueError(f"rounds ({bench.rounds}) and scale ({bench.scale}) must be positive")
    results = []
    versions: dict[str, dict[str, str]] = {}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(PeerProcess(name)) for name in peers]
        current = None
        for workload in sorted((w for w in known if w.name in chosen), key=_by_options):
            options = Options(
                threads=bench.threads,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=MAX_NUM_SEQS,
                prefix_caching=workload.prefix_caching,
            )
            if options != current:
                versions = {p.name: p.setup(folder, options) for p in processes}
                current = options
            results.append(_measure_workload(workload, processes, bench))
    return {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(bench).items()},
        "config": config,
        "machine": machine(),
        "versions": versions,
        "results": results,
    }


def _by_options(workload: Workload) -> bool:
    """Sort key: workloads with the same engine options stand together, for one set-up."""
    return workload.prefix_caching


def _measure_workload(
    workload: Workload, peers: list[PeerProcess], bench: OfflineBench
) -> dict[str, Any]:
    """Round 0 warms up. In each round every peer gets the same work, new in each round."""
    seconds: dict[str, list[list[float]]] = {peer.name: [] for peer in peers}
    values: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for number in range(bench.rounds + 1):
        works = workload.make(random.Random(f"{bench.seed} {workload.name} {number}"))
        for peer in peers:
            taken = [peer.run(work) for work in works]
            if number > 0:
                seconds[peer.name].append(taken)
                values[peer.name].append(workload.value(works, taken))
    load = os.getloadavg()[0]  # of the last minute: more than `threads` means that others were busy
    medians = {name: statistics.median(value) for name, value in values.items()}
    ours, *others = medians
    return {
        "workload": workload.name,
        "unit": workload.unit,
        "median": medians,
        "speedup": {o: workload.speedup(medians[ours], medians[o]) for o in others},
        "load": load,
        "values": values,
        "seconds": seconds,
    }


def checkpoint(bench: OfflineBench) -> tuple[Path, dict[str, Any]]:
    """The folder that all peers read, written now if it is a shape's first time; its config."""
    if bench.model is not None:
        config = json.loads((bench.model / "config.json").read_text())
        return bench.model.resolve(), config
    config = SHAPES[bench.shape]
    folder = bench.cache_dir.expanduser() / bench.shape
    return tiny.write_checkpoint(folder, config).resolve(), config


def machine() -> dict[str, Any]:
    """What the numbers depend on besides versions."""
    processor = platform.processor()
    with contextlib.suppress(OSError):  # says more, on Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor,
        "num_processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_size / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def table(report: dict[str, Any]) -> str:
    """Medians, and in brackets how many times as fast the first engine is as each other one."""
    rows = [["workload", "unit", *report["results"][0]["median"]]]
    for result in report["results"]:
        cells = []
        for name, median in result["median"].items():
            speedup = result["speedup"].get(name)
            cells.append(f"{median:.1f}" + (f" ({speedup:.2f}x)" if speedup else ""))
        rows.append([result["workload"], result["unit"], *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
