"""`jaxpage bench offline`: the same offline work with jaxpage and other engines, interleaved.

One engine runs at a time, rounds alternate between them, and medians are compared, so that a slow minute of the machine
affects all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import platform
import random
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxpage import tiny
from jaxpage.bench import peaks, results
from jaxpage.bench.flags import check_above_zero, check_least
from jaxpage.bench.peers import PEERS, PeerProcess, engine_of
from jaxpage.bench.workloads import Workload, run_interleaved, workloads

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
Shape = Literal["tiny", "qwen2.5-0.5b"]
CACHE = Path("~/.cache/jaxpage/bench")  # where checkpoints of a shape are written
ENGINES = {  # names for `compare`: their peers
    "transformers": ("transformers-generate", "transformers-continuous"),
    "vllm": ("vllm",),
    "llama.cpp": ("llama.cpp",),
    "jaxpage-int8": ("jaxpage-int8",),
    "jaxpage-strict": ("jaxpage-strict",),
}


@dataclass(frozen=True, kw_only=True)
class OfflineBench:
    """Compare offline throughput with other engines, in bfloat16, greedily."""

    # besides jaxpage: transformers, vllm, llama.cpp, jaxpage-int8, jaxpage-strict; "a,b" and "a b" are the same
    compare: tuple[str, ...] = ()
    python: tuple[str, ...] = ()  # ENGINE=EXECUTABLE: an engine's Python, if not the one running
    shape: Shape = "qwen2.5-0.5b"  # random weights of this shape
    model: Path | None = None  # a checkpoint folder, instead of a shape
    workloads: tuple[str, ...] = ()  # names; none: all
    rounds: int = 5  # counted rounds, after an uncounted one
    scale: float = 1.0  # of prompt and output lengths, steps and the number of requests
    threads: int = 2
    seed: int = 0
    json: Path | None = None  # all timings, versions and the machine go to this file


def main(bench: OfflineBench) -> None:
    """Measure, print a table, and write all timings to `bench.json` if given."""
    compared = split(bench.compare)
    if unknown := set(compared) - set(ENGINES):
        raise ValueError(f"no engine {sorted(unknown)} to compare; there are {', '.join(ENGINES)}")
    report = measure(bench, ["jaxpage", *(peer for name in compared for peer in ENGINES[name])])
    results.publish(report, bench.json, show(report))


def split(names: Sequence[str]) -> list[str]:
    """`("a,b", "c")` names a, b and c."""
    return [name for part in names for name in part.split(",") if name]


def pythons(entries: Sequence[str]) -> dict[str, str]:
    """Each engine's executable: this one, or that of an entry `ENGINE=EXECUTABLE`. Raises ValueError."""
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
    """Run the workloads with each of the named peers and return all measurements.

    Raises ValueError for an unknown workload and for a peer that is not installed, RuntimeError if a peer fails.
    """
    check_least(bench, rounds=1, threads=1)
    check_above_zero(bench, "scale")
    python = pythons(bench.python)
    chosen = _names(bench)
    folder, config = checkpoint(bench.shape, bench.model)
    known = workloads(config["vocab_size"], bench.scale)
    report: dict[str, Any] = {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(bench).items()},
        "config": config,
        "machine": machine(),
        "bandwidth": peaks.memory_bandwidth(bench.threads),
        "weight_bytes": weight_bytes(folder, config),
        "versions": {},
        "results": [],
    }
    # Workloads that need the same options and peers share processes.
    for (options, also), group in itertools.groupby(
        [w for name, w in known.items() if name in chosen], lambda w: (w.options, w.also)
    ):
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(
                    PeerProcess(peer, python[engine_of(peer)], threads=bench.threads)
                )
                for peer in [*peers, *(also if "jaxpage" in peers else ())]
            ]
            # Ours last: its programs take long to compile, and a missing package should be reported before.
            for process in processes[::-1]:
                report["versions"][process.name] = process.setup(folder, options)
            report["results"] += [_measure_workload(w, processes, bench) for w in group]
    return report


def _names(bench: OfflineBench) -> list[str]:
    """The names of the workloads to measure. Raises ValueError for an unknown one."""
    known = workloads(tiny.TINY_CONFIG["vocab_size"], bench.scale)  # names are those of any size
    chosen = split(bench.workloads) or list(known)
    if unknown := set(chosen) - set(known):
        raise ValueError(f"no workload {sorted(unknown)}; there are {', '.join(known)}")
    return chosen


def _measure_workload(
    workload: Workload, peers: list[PeerProcess], bench: OfflineBench
) -> dict[str, Any]:
    seeds = [f"{bench.seed} {workload.name} {number}" for number in range(bench.rounds + 1)]
    rounds = [workload.make(random.Random(seed)) for seed in seeds]
    seconds = run_interleaved({peer.name: peer.run for peer in peers}, rounds)
    values = {
        name: [workload.value(*pair) for pair in zip(rounds[1:], taken, strict=True)]
        for name, taken in seconds.items()
    }
    medians = {name: statistics.median(value) for name, value in values.items()}
    logger.info("%s, %s: %s", workload.name, workload.unit, _joined(medians))
    ours, *others = medians
    return {
        "workload": workload.name,
        "unit": workload.unit,
        "median": medians,
        "speedup": {o: workload.speedup(medians[ours], medians[o]) for o in others},
        "load": os.getloadavg()[0],  # of the last minute: above `threads` if other processes ran
        "values": values,
        "seconds": seconds,
    }


def checkpoint(shape: str, model: Path | None = None) -> tuple[Path, dict[str, Any]]:
    """`model`, or the folder of a shape, which is written the first time; and its config."""
    if model is not None:
        return model.resolve(), json.loads((model / "config.json").read_text())
    folder = tiny.write_checkpoint(CACHE.expanduser() / shape, SHAPES[shape])
    return folder.resolve(), SHAPES[shape]


def engine_options(text: str) -> dict[str, Any]:
    """Options of `LLM` given as JSON. Raises ValueError."""
    try:
        return {**json.loads(text)}
    except (ValueError, TypeError):
        raise ValueError(f"options must be a JSON object of options of LLM, got {text!r}") from None


def weight_bytes(folder: Path, config: dict[str, Any]) -> int:
    """Bytes that a decode step reads of the checkpoint: all but an untied embedding."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not config.get("tie_word_embeddings", False):
        size -= 2 * config["vocab_size"] * config["hidden_size"]  # only a few rows are read
    return size


def machine() -> dict[str, Any]:
    """What the figures depend on besides versions."""
    info = Path("/proc/cpuinfo")  # more detailed than `platform`, on Linux
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return {
        "processor": names[0] if names else platform.processor(),
        "num_processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def show(report: dict[str, Any]) -> str:
    """Everything that is printed: medians, and their ratio to memory bandwidth."""
    lines = [table(report["results"])]
    copy, read = (report["bandwidth"][kind] / 1e9 for kind in ("copy", "read"))
    weights = report["weight_bytes"] / 1e9
    once = weights / copy * 1e3
    lines.append(
        f"memory: copy {copy:.1f} GB/s (read and written), read {read:.1f} GB/s; "
        f"at copy speed {weights:.3f} GB of weights are read once in {once:.2f} ms"
    )
    for result in report["results"]:
        if result["workload"] == "decode-8":
            ratios = {peer: median / once for peer, median in result["median"].items()}
            lines.append(f"decode-8 step over that time: {_joined(ratios)}")
    return "\n".join(lines)


def table(found: list[dict[str, Any]]) -> str:
    """Medians, and in parentheses how many times as fast the first engine is as each other one."""
    peers = list(dict.fromkeys(peer for result in found for peer in result["median"]))
    rows = [["workload", "unit", *peers]]
    for result in found:
        cells = {peer: f"{median:.1f}" for peer, median in result["median"].items()}
        for peer, speedup in result["speedup"].items():
            cells[peer] += f" ({speedup:.2f}x)"
        rows.append([result["workload"], result["unit"], *(cells.get(peer, "") for peer in peers)])
    return results.table(rows, left=2)


def _joined(values: dict[str, float]) -> str:
    return ", ".join(f"{peer} {value:.2f}" for peer, value in values.items())
