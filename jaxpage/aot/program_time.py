"""Estimates of a program's time, as JSON: cycles of XLA's own instructions, and each kernel's schedule; for GPUs
nanoseconds of all kernels but attention's.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

from jaxpage.aot.cycles import Cost, costs_of, grouped
from jaxpage.aot.gpu_time import nanoseconds
from jaxpage.aot.targets import Chip
from jaxpage.aot.tpu_schedule import Schedule, base_name, schedules

_MOST_PARTS = 40
_ARRAY = re.compile(r"\w+\[[\d,]*\]")


def time_of(text: str, chip: Chip, dumped: Path | None) -> dict[str, Any]:
    """`text`: optimised HLO; `dumped`: the folder where libtpu writes schedules; None for a GPU."""
    costs = costs_of(text, nanoseconds(text, chip) if dumped is None else None)
    parts = [
        {"what": _what(cost), "count": count, "cycles": cycles}
        for cost, count, cycles in list(grouped(costs.costs))[:_MOST_PARTS]
    ]
    return {
        "cycles": costs.cycles,
        "in_other_branches": costs.in_other_branches,
        "parts": parts,
        "kernels": _kernels([each for each in costs.costs if each.cycles is None], dumped),
    }


def _kernels(calls: list[Cost], dumped: Path | None) -> list[dict[str, Any]]:
    """Identical kernels are compiled, and dumped, once. `program`: None if its schedule was not found."""
    if dumped is None:
        number = sum(call.times for call in calls)
        return [{"name": "paged_attention", "count": number, "program": None}] if number else []
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for call in calls:
        counts[base_name(call.name), tuple(_ARRAY.findall(call.made))] += call.times
    names = {name for name, _ in counts}
    found: dict[tuple[str, tuple[str, ...]], Schedule] = {}
    for schedule in schedules(dumped, sorted(names)) if names else ():
        found[base_name(schedule.name), schedule.results] = schedule
    return [
        {
            "name": key[0],
            "count": count,
            "program": dataclasses.asdict(found[key].program) if key in found else None,
        }
        for key, count in counts.items()
    ]


def _what(cost: Cost) -> str:
    """The last two parts of its name, and its result's array type."""
    made = _ARRAY.search(cost.made)
    return f"{'/'.join(cost.op_name.split('/')[-2:])} {made[0] if made else ''}".strip()
