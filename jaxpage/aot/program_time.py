"""Estimates of a program's time, as JSON: cycles of XLA's own instructions, and each kernel's schedule; for GPUs
nanoseconds of all kernels but attention's and those of recurrent states.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from jaxpage.aot.cycles import Cost, costs_of, grouped, total_cycles
from jaxpage.aot.gpu_time import nanoseconds, ours
from jaxpage.aot.hlo import Program
from jaxpage.aot.targets import Chip
from jaxpage.aot.tpu_schedule import Schedule, base_name, schedules

_MOST_PARTS = 40


def time_of(program: Program, chip: Chip, dumped: Path | None, *, turns: int = 1) -> dict[str, Any]:
    """`dumped`: the folder where libtpu writes schedules; None for a GPU. `turns`: see `cycles.costs_of`."""
    estimates = nanoseconds(program, chip) if dumped is None else None
    costs = costs_of(program, estimates, turns=turns)
    parts = [
        {"what": _what(cost), "count": count, "cycles": cycles}
        for cost, count, cycles in grouped(costs)[:_MOST_PARTS]
    ]
    kernels = [each for each in costs if each.cycles is None]
    return {
        "cycles": total_cycles(costs),
        "parts": parts,
        "kernels": _kernels(kernels, dumped),
    }


def _kernels(calls: list[Cost], dumped: Path | None) -> list[dict[str, Any]]:
    """Identical kernels are compiled, and dumped, once. `program`: None if its schedule was not found; `width`: of the
    rows of its first result.
    """
    if dumped is None:
        numbers: Counter[str | None] = Counter()
        for call in calls:
            numbers[ours(call.instruction)] += call.times
        return [{"name": name, "count": n, "program": None} for name, n in numbers.items()]
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    widths: dict[tuple[str, tuple[str, ...]], int] = {}
    for call in calls:
        arrays = call.instruction.arrays
        key = base_name(call.instruction.name), tuple(map(str, arrays))
        counts[key] += call.times
        widths[key] = arrays[0].shape[-1] if arrays and arrays[0].shape else 0
    names = {name for name, _ in counts}
    found: dict[tuple[str, tuple[str, ...]], Schedule] = {}
    for schedule in schedules(dumped, sorted(names)) if names else ():
        found[base_name(schedule.name), schedule.results] = schedule
    return [
        {
            "name": key[0],
            "count": count,
            "width": widths[key],
            "program": dataclasses.asdict(found[key].program) if key in found else None,
        }
        for key, count in counts.items()
    ]


def _what(cost: Cost) -> str:
    """The last two parts of its origin, and its first array's type."""
    arrays = cost.instruction.arrays
    return f"{'/'.join(cost.origin.split('/')[-2:])} {arrays[0] if arrays else ''}".strip()
