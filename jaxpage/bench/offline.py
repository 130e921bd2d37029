"""`jaxpage bench offline`: the same offline work through jaxpage and other engines, in turns.

Knows the order of measurements and what is reported; what is measured is in `workloads.py`, how an
engine is driven in `engines.py`. One engine works at a time, rounds alternate between them, and
medians are compared, so a slow minute of the machine falls on all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import platform
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxpage import tiny
from jaxpage.bench import bandwidth, warm_up
from jaxpage.bench.peers import PEERS, PeerProcess, check_python, engine_of
from jaxpage.bench.workloads import MAX_NUM_SEQS, Workload, workloads

logger = logging.getLogger(__name__)

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
ENGINES = {  # what `compare` may name: peers
    "transformers": ("transformers-generate", "transformers-continuous"),
    "vllm": ("vllm",),
    "llama.cpp": ("llama.cpp",),
    "jaxpage-int8": ("jaxpage-int8",),
}
WARM_UP = "warm-up"  # measured otherwise than the workloads, and of jaxpage alone


@dataclass(frozen=True, kw_only=True)
class OfflineBench:
    """Compare offline throughput with other engines, in bfloat16, greedily."""

    # besides jaxpage: transformers, vllm, llama.cpp, jaxpage-int8; "a,b" and "a b" are the same
    compare: tuple[str, ...] = ()
    python: tuple[str, ...] = ()  # ENGINE=EXECUTABLE: an engine's Python, if not the one running
    shape: Literal["tiny", "qwen2.5-0.5b"] = "qwen2.5-0.5b"  # random weights of this shape
    model: Path | None = None  # a checkpoint folder, instead of a shape
    workloads: tuple[str, ...] = ()  # names, all of them if none is given
    rounds: int = 5  # counted rounds, after one that is not
    scale: float = 1.0  # of prompt and output lengths, steps and the number of requests
    threads: int = 2
    seed: int = 0
    cache_dir: Path = Path("~/.cache/jaxpage/bench")  # where checkpoints of a shape are kept
    json: Path | None = None  # all timings, versions and the machine go to this file


def main(bench: OfflineBench) -> None:
    """Measure, print a table, and write all timings to `bench.json` if asked for."""
    compared = split(bench.compare)
    if unknown := set(compared) - set(ENGINES):
        raise ValueError(f"no engine {sorted(unknown)} to compare; there are {', '.join(ENGINES)}")
    report = measure(bench, ["jaxpage", *(peer for name in compared for peer in ENGINES[name])])
    if bench.json is not None:
        bench.json.write_text(json.dumps(report, indent=1) + "\n")
    print(show(report))


def split(names: Sequence[str]) -> list[str]:
    """`("a,b", "c")` names a, b and c."""
    return [name for part in names for name in part.split(",") if name]


def pythons(entries: Sequence[str]) -> dict[str, str]:
    """Each engine's executable: ours, or what `ENGINE=EXECUTABLE` says. Raises ValueError."""
    found = {engine_of(peer): sys.executable for peer in PEERS}
    for entry in split(entries):
        engine, _, python = entry.partition("=")
        if engine not in found or not python:
            raise ValueError(
                f"python must be ENGINE=EXECUTABLE, ENGINE one of {', '.join(found)}; got {entry!r}"
            )
        found[engine] = python
    return found


def measure(bench: OfflineBench, peers: list[str]) -> dict[str, Any]:
    """Run the workloads through each of the named peers and return everything that was seen.

    Raises ValueError for an unknown workload or peer and for a peer that is not installed,
    RuntimeError if a peer fails.
    """
    folder, config = checkpoint(bench)
    known = workloads(config["vocab_size"], bench.scale)
    names = [*(w.name for w in known), WARM_UP]
    chosen = split(bench.workloads) or names
    if unknown := set(chosen) - set(names):
        raise ValueError(f"no workload {sorted(unknown)}; there are {', '.join(names)}")
    if bench.rounds < 1 or bench.scale <= 0:
        raise ValueError(f"rounds ({bench.rounds}) and scale ({bench.scale}) must be positive")
    python = pythons(bench.python)
    for peer in peers:
        check_python(peer, python[engine_of(peer)])
    report: dict[str, Any] = {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(bench).items()},
        "config": config,
        "machine": machine(),
        "bandwidth": bandwidth.measure(bench.threads),
        "weight_bytes": weight_bytes(folder, config),
        "versions": {},
        "results": [],
    }
    for (options, also), group in itertools.groupby(
        [w for w in known if w.name in chosen], lambda w: (w.options(bench.threads), w.also)
    ):
        # The same processes for all workloads that need the same.
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(PeerProcess(peer, python[engine_of(peer)]))
                for peer in [*peers, *(also if "jaxpage" in peers else ())]
            ]
            for process in processes:
                report["versions"][process.name] = process.setup(folder, options)
            for workload in group:
                report["results"].append(_measure_workload(workload, processes, bench))
    if WARM_UP in chosen and "jaxpage" in peers:
        size = {"max_model_len": known[0].max_model_len, "max_num_seqs": MAX_NUM_SEQS}
        report["warm_up"] = [
            warm_up.measure(folder, python["jaxpage"], bench.threads, size)
            for _ in range(bench.rounds)
        ]
    return report


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
    logger.info("%s, %s: %s", workload.name, workload.unit, _joined(medians))
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


def weight_bytes(folder: Path, config: dict[str, Any]) -> int:
    """What a decode step reads of the checkpoint: all but an embedding that is not the head too."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not config.get("tie_word_embeddings", False):
        size -= 2 * config["vocab_size"] * config["hidden_size"]  # a few rows of it are read
    return size


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


def show(report: dict[str, Any]) -> str:
    """Everything that is printed."""
    return "\n".join([*table(report["results"]), *_against_memory(report), *_start_up(report)])


def table(results: list[dict[str, Any]]) -> list[str]:
    """Medians, and in brackets how many times as fast the first engine is as each other one."""
    if not results:
        return []
    peers = list(dict.fromkeys(peer for result in results for peer in result["median"]))
    rows = [["workload", "unit", *peers]]
    for result in results:
        cells = []
        for peer in peers:
            median, speedup = result["median"].get(peer), result["speedup"].get(peer)
            cells.append("" if median is None else f"{median:.1f}")
            cells[-1] += f" ({speedup:.2f}x)" if speedup else ""
        rows.append([result["workload"], result["unit"], *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _against_memory(report: dict[str, Any]) -> list[str]:
    """The time to read the weights once, and how many times that each decode-8 step takes."""
    copy, read = (report["bandwidth"][kind] / 1e9 for kind in ("copy", "read"))
    weights = report["weight_bytes"] / 1e9
    once = weights / copy * 1e3
    lines = [
        f"memory: copy {copy:.1f} GB/s (read and written), read {read:.1f} GB/s; "
        f"at copy speed {weights:.3f} GB of weights are read once in {once:.2f} ms"
    ]
    for result in report["results"]:
        if result["workload"] == "decode-8":
            ratios = {peer: median / once for peer, median in result["median"].items()}
            lines.append(f"decode-8 step over that time: {_joined(ratios)}")
    return lines


def _joined(values: dict[str, float]) -> str:
    return ", ".join(f"{peer} {value:.2f}" for peer, value in values.items())


def _start_up(report: dict[str, Any]) -> list[str]:
    starts = report.get("warm_up")
    if not starts:
        return []
    lines = []
    for cache in starts[0]:
        first, warm = (
            statistics.median(start[cache][event] for start in starts)
            for event in ("first_token", "warm")
        )
        lines.append(f"start, {cache}: first token {first:.1f} s, all programs {warm:.1f} s")
    return lines
