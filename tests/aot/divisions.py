"""The table of `jaxpage plan --tp auto` in jaxpage/aot/README.md: `python -m tests.aot.divisions` prints it.

Nothing is compiled for it, but both compilers must be installed: they know the devices of a target.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxpage.aot.replicas import Division, best
from jaxpage.aot.targets import GIB
from tests.aot.models import MODELS

TARGETS = ("v5e:4x4", "v6e:2x4", "tpu7x:2x2x1", "h200:8")
SHOWN = ("Llama-3.1-8B", "Qwen2.5-32B", "Llama-3.3-70B")
COLUMNS = {
    "model": "---",
    "target": "---",
    "best": "---",
    "weights, GiB": "---:",
    "KV tokens": "---:",
    "batch 1, ms": "---",
    "batch 64, ms": "---",
    "full batch, ms": "---",
    "tokens/s per chip, by TP": "---",
}


def main() -> None:
    for cells in (COLUMNS, COLUMNS.values()):
        print(f"| {' | '.join(cells)} |")
    for model in SHOWN:
        divisions = _divisions(model)
        for target in TARGETS:
            print(
                f"| {model} | {target} | {_row([d for d in divisions if _target(d) == target])} |"
            )


def _divisions(model: str) -> list[Division]:
    with tempfile.TemporaryDirectory() as folder:
        config, report = Path(folder, "config.json"), Path(folder, "report.json")
        config.write_text(json.dumps(MODELS[model]))
        flags = ["--target", TARGETS[0], "--compare", *TARGETS[1:], "--tp", "auto"]
        flags += ["--max-model-len", "32768", "--json", str(report)]
        run = "import sys; from jaxpage.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", run, "plan", str(config), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [Division(measured) for measured in json.loads(report.read_text())]


def _target(division: Division) -> str:
    return division.measured["target"]


def _row(divisions: list[Division]) -> str:
    chosen = best(divisions)
    if chosen is None:
        return "none fits | | | | | | "
    found, full = chosen.estimate, chosen.full_batch
    cells = [
        f"TP {chosen.num_devices} × {chosen.num_replicas}",
        f"{found.weight_bytes / GIB:.2f}",
        f"{chosen.num_kv_tokens:,}",
        *_steps(chosen),
        f"{chosen.step(full).total:.2f} at {full}",
        ", ".join(_rates(divisions)),
    ]
    return " | ".join(cells)


def _steps(division: Division) -> Iterator[str]:
    """Of one sequence and of 64, in weights, KV and exchange."""
    for batch in (1, 64):
        step = division.step(batch)
        parts = f"{step.weights:.2f} + {step.kv:.2f} + {step.exchange:.2f}"
        yield f"{step.total:.2f} ({parts})"


def _rates(divisions: list[Division]) -> Iterator[str]:
    for each in divisions:
        rate = f"{each.tokens_per_second_per_chip:,.0f}" if each.estimate.fits else "–"
        yield f"{each.num_devices}: {rate}"


if __name__ == "__main__":
    main()
