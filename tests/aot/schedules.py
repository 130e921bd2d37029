"""The schedules of a dozen calls of kernels for TPUs: what their main loop takes, and how many registers it spills.

The calls are those of other suites, and two of attention with the KV head that each of eight chips has. `python -m
tests.aot.schedules` writes `ceilings.json` anew, from the evidence: what `test_schedules.py` holds each figure to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxpage.aot import attention_time, cycles, tpu_schedule
from jaxpage.aot.attention_time import Turn, bundles_of_turn
from jaxpage.aot.cycles import costs_of
from jaxpage.aot.hlo import parse
from jaxpage.aot.tpu_schedule import Region
from tests.aot import evidence
from tests.aot import paged_attention_tpu as attention
from tests.aot.program import Program
from tests.aot.suites import suite

TARGETS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
CEILINGS = Path(__file__).with_name("ceilings.json")
SLACK = 1.05
CALLS = {
    "paged_attention_tpu": (
        "llama-8b",
        "llama-8b-decode",
        "llama-8b-int8",
        "llama-8b-int8-decode",
        "llama-8b-fp8-e4m3-decode",
        "deepseek-v3-of-tp8",
        "deepseek-v3-of-tp8-decode",
        "deepseek-v3-of-tp8-fp8-decode",
    ),
    "quant_matmul": (
        "int8-8x3584x37888",
        "int8-2048x3584x37888",
        "int4-8x3584x37888",
        "int4-64x3584x37888",
        "int4-2048x3584x37888",
        "fp8_e4m3-groups-8x3584x37888",
        "fp8_e4m3-groups-2048x3584x37888",
    ),
    "grouped_matmul": (
        "qwen3-30b-a3b-64-ours",
        "qwen3-30b-a3b-64-int4-128",
        "qwen3-30b-a3b-64-fp8_e4m3-128",
        "mixtral-8x7b-2048-ours",
    ),
    "lora": ("8-of-rank-64-32x3584x3584+512+512-bfloat16",),
    "rope": ("qwen2.5-7b-256",),
    "delta_rule": ("qwen3.5-4b", "windows-qwen3.5-4b-one"),
}
_ONE_HEAD = attention.Call(name="llama-8b-of-tp8", num_heads=4, num_kv_heads=1, head_dim=128)
ONE_HEAD = (_ONE_HEAD, replace(_ONE_HEAD, name="llama-8b-of-tp8-decode", num_tokens=64))
# A turn of attention over a whole fetch, unmasked, and one over a part of a block.
WHOLE, PART = (
    Turn(
        is_whole=is_whole,
        ends_within=not is_whole,
        is_masked=not is_whole,
        num_blocks=4 if is_whole else 1,
        num_tiles=1,
        num_cleared=0 if is_whole else 3,
    )
    for is_whole in (True, False)
)
_FOLDER = "SCHEDULES_FOLDER"  # a variable of the process that compiles


def dump_variables(folder: Path) -> dict[str, str]:
    return tpu_schedule.dump_variables(folder) | {_FOLDER: str(folder)}


def programs(target: str) -> Iterator[Program]:
    for name, chosen in CALLS.items():
        for program in suite(name).programs(target):
            if program.name in chosen:
                yield _observed(replace(program, name=f"{name} {program.name}"))
    for call in ONE_HEAD:
        lower = partial(attention.lower, call, target)
        yield _observed(Program(name=f"paged_attention_tpu {call.name}", lower=lower, look=_look))


def _observed(program: Program) -> Program:
    return replace(program, look=_look, observers=(attention_time, tpu_schedule, cycles))


def _look(compiled: Any, log: str) -> dict[str, Any]:
    """Bundles of an iteration of the loops that multiply, of all kernels: all bundles, and without what may be jumped
    over; of a kernel without such a loop, of all of it. Inner loops count as often as they are known to run, else once.
    Of attention's also those of turns, whose branches `attention_time` chooses.
    """
    costs = costs_of(parse(compiled.as_text() or ""))
    names = [each.instruction.name for each in costs if each.cycles is None]
    kernels = tpu_schedule.take_schedules(Path(os.environ[_FOLDER]), names)
    assert kernels, "the compiled program has no kernel"
    loops = [loop for kernel in kernels for loop in kernel.main_loops]
    found: dict[str, Any] = {
        "bundles": sum(each.bundles for each in loops),
        "usual": sum(_usual(each) for each in loops),
        "spills": sum(each.used("VSTORE:SPILL") for each in loops),
    }
    if any(each.name.startswith("paged_attention") for each in kernels):
        turns = [turn for unit in loops for turn in unit.loops if turn.multiplies]
        for name, turn in (("whole", WHOLE), ("part", PART)):
            found[name] = round(sum(bundles_of_turn(each, turn) for each in turns))
    return found


def _usual(region: Region) -> int:
    """Bundles of an iteration without what may be jumped over, but with all loops within that multiply."""
    within = ((each.trips or 1) * _usual(each) for each in region.loops if each.multiplies)
    return region.own + sum(within)


def kept() -> dict[str, dict[str, dict[str, int]]]:
    """By target and call, as the evidence has it."""
    return {
        target: {
            name: each.found for name, each in evidence.read("schedules", target).records.items()
        }
        for target in TARGETS
    }


def ceilings() -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(CEILINGS.read_text())


def exceeded(found: dict[str, dict], ceiling: dict[str, dict]) -> dict[str, Any]:
    """Figures above their ceiling, by call: (found, ceiling). Calls without one, too, and ceilings without a call."""
    above: dict[str, Any] = {}
    for name in sorted(found.keys() | ceiling.keys()):
        if name not in found or name not in ceiling:
            above[name] = "no ceiling" if name in found else "not compiled"
            continue
        for figure, most in ceiling[name].items():
            if found[name][figure] > SLACK * most:
                above[f"{name} {figure}"] = (found[name][figure], most)
    return above


def main() -> None:
    """A line a call."""
    lines = [
        f'"{target}": {{\n'
        + ",\n".join(
            f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(calls.items())
        )
        + "\n}"
        for target, calls in kept().items()
    ]
    CEILINGS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
