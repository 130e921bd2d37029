"""The README's table of what compiles where, from what the tests saw: `python -m tests.aot.table` writes it.

`pytest -m aot tests/aot/test_table.py` compiles everything, keeps what it saw in pytest's cache and compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpage.aot.targets import CHIPS, parse_target
from jaxpage.aot.topology import missing_compiler
from tests.aot import block_copy, gpu, grouped_matmul, kv_write, quant_matmul, steps, tpu

ROOT = Path(__file__).parents[2]
KEPT = "aot/seen"  # the name in pytest's cache
BEGIN, END = "<!-- what compiles where: begin -->\n", "<!-- what compiles where: end -->\n"


@dataclass(frozen=True)
class Kernel:
    """A line of the table. `compile_all(target)`: what the compiler says of each program; an "error" if it refused.

    It keeps its result (`functools.cache`), so that nothing is compiled for the table alone.
    """

    name: str
    compile_all: Callable[[str], list[dict[str, Any]]]
    targets: tuple[str, ...]


ALL = (*tpu.TOPOLOGIES, "h200")


def _attention_of_gpus(target: str) -> list[dict[str, Any]]:
    return [each for each in gpu.compile_all(target) if "temp" in each]


def _writes(target: str) -> list[dict[str, Any]]:
    assert target == kv_write.TARGET
    return kv_write.compile_all()


def _our_grouped_products(target: str) -> list[dict[str, Any]]:
    return [
        each
        for each in grouped_matmul.compile_all(target)
        if not each["name"].endswith("ragged_dot")
    ]


KERNELS = (
    Kernel("paged_attention", tpu.compile_all, tpu.TOPOLOGIES),
    Kernel("paged_attention", _attention_of_gpus, ("h200",)),
    Kernel("kv_write", _writes, ("h200",)),
    Kernel("block_copy", block_copy.compile_all, ALL),
    Kernel("quant_matmul", quant_matmul.compile_all, ALL),
    Kernel("grouped_matmul", _our_grouped_products, ALL),
)


def missing() -> str | None:
    """What must be installed to see everything."""
    return missing_compiler("tpu") or missing_compiler("gpu")


def see(compiled: dict[steps.Place, list[dict[str, Any]]]) -> dict[str, Any]:
    """What of all programs is the same on any machine: which compile, and how many there are."""
    kernels: dict[str, dict[str, int]] = {}
    calls = [(kernel, target) for kernel in KERNELS for target in kernel.targets]
    with ThreadPoolExecutor(2) as pool:  # each call is a process
        found = list(pool.map(lambda call: call[0].compile_all(call[1]), calls))
    for (kernel, target), programs in zip(calls, found, strict=True):
        number = sum("error" not in each for each in programs)
        kernels.setdefault(kernel.name, {})[parse_target(target).chip.name] = number
    places = []
    for place, programs in compiled.items():
        count = {
            model: [
                sum(
                    each["model"] == model and (each["num_layers"] == steps.FEW) is few
                    for each in programs
                )
                for few in (True, False)
            ]  # with few layers, whole
            for model in steps.MODELS
        }
        has_kernel = any(steps.attention_calls(each) for each in programs)
        attention = "kernel" if has_kernel else "plain XLA"
        manifest = programs[0]["num_programs"]
        found = {"attention": attention, "programs": count, "manifest": manifest}
        places.append({"place": place.name} | found)
    return {"kernels": kernels, "places": places}


def render(seen: dict[str, Any]) -> str:
    """The lines between BEGIN and END."""
    chips = list(CHIPS)
    lines = [f"| programs of a kernel | {' | '.join(chips)} |", f"| --- |{' ---: |' * len(chips)}"]
    for name, found in seen["kernels"].items():
        lines.append(f"| `{name}` | {' | '.join(str(found.get(chip, '')) for chip in chips)} |")
    models = list(steps.MODELS)
    lines += [
        "",
        f"| steps with {steps.FEW} layers | attention | {' | '.join(models)} | all programs |",
        f"| --- | --- |{' ---: |' * (len(models) + 1)}",
    ]
    for place in seen["places"]:
        counts = [place["programs"][model] for model in models]
        cells = [f"{few} + {whole} whole" if whole else str(few) for few, whole in counts]
        total = f"{sum(map(sum, counts))} of {place['manifest']}"
        cells = [place["place"], place["attention"], *cells, total]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def in_readme() -> str:
    """What stands between BEGIN and END. Raises ValueError if they do not stand there once."""
    _, found, _ = _parts()
    return found


def _parts() -> tuple[str, str, str]:
    text = (ROOT / "README.md").read_text()
    if (text.count(BEGIN), text.count(END)) != (1, 1):
        raise ValueError(f"README.md must have these lines once: {BEGIN}{END}")
    before, rest = text.split(BEGIN)
    found, after = rest.split(END)
    return before, found, after


def main(kept: str = str(ROOT / ".pytest_cache" / "v" / KEPT)) -> None:
    before, _, after = _parts()
    table = render(json.loads(Path(kept).read_text()))
    (ROOT / "README.md").write_text(before + BEGIN + table + END + after)


if __name__ == "__main__":
    main(*sys.argv[1:])
