"""Where the time of a program goes. For TPUs by the compiler's own estimates: the `estimated_cycles` in its HLO.

XLA annotates each fusion and copy with the cycles it expects it to take, considering bytes and flops. The estimates of
a program add up along its control flow:

- A computation that an instruction names in `calls`, such as a fusion's, is included in that instruction's estimate.
- The body of a loop counts with its known trip count, or else once.
- Of a conditional one branch runs. The cheapest one counts, since the others are for requests that ask for more.
- Instructions without an estimate have a sentinel near 2**63, or nothing: kernels, which `tpu_schedule` covers, and the
  ends of asynchronous operations.

For GPUs, `gpu_time` estimates nanoseconds instead, which stand for cycles here.

Reads programs in the syntax of `hlo`. Must not know jax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxpage.aot.hlo import Instruction, Program

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRUE_FALSE = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")
_APPLIED = re.compile(r"\bto_apply=%?([\w.\-]+)")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_SENTINEL = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Cost:
    """cycles: of one execution; None for a kernel. times: how often the instruction runs."""

    instruction: Instruction
    cycles: int | None
    times: int

    @property
    def origin(self) -> str:
        """The name of what was traced, or else its own name."""
        return self.instruction.op_name or self.instruction.name


def costs_of(
    program: Program, estimates: Mapping[str, int | None] | None = None, *, turns: int = 1
) -> list[Cost]:
    """The costs of the instructions that run and cost something.

    `estimates`: their cycles by name, instead of those in the text; None for a kernel. `turns`: how often a loop runs
    whose trip count is not known; within such a loop, others run once.
    """
    return list(_costs(program, program.entry, 1, estimates, turns))


def total_cycles(costs: Sequence[Cost]) -> int:
    """The cycles of all, without kernels."""
    return sum((each.cycles or 0) * each.times for each in costs)


def _costs(
    program: Program,
    name: str,
    times: int,
    estimates: Mapping[str, int | None] | None,
    turns: int,
) -> Iterator[Cost]:
    """The costs of a computation that runs `times` times."""
    for each in program.computations.get(name, ()):
        called, trips = _called(each)
        if called:
            inner = turns if trips else 1
            runs = times * (trips or turns)
            branches = (list(_costs(program, c, runs, estimates, inner)) for c in called)
            yield from min(branches, key=total_cycles)
            continue
        cycles = _cycles(each) if estimates is None else estimates.get(each.name, 0)
        if cycles != 0:
            yield Cost(instruction=each, cycles=cycles, times=times)


def _cycles(instruction: Instruction) -> int | None:
    if _KERNEL in instruction.line:
        return None
    found = _CYCLES.search(instruction.line)
    estimate = int(found[1]) if found else 0
    return estimate if estimate < _SENTINEL else 0


def _called(instruction: Instruction) -> tuple[Sequence[str], int | None]:
    """The computations of which an instruction runs one, and how often it does; None: not known."""
    line, opcode = instruction.line, instruction.opcode
    if opcode == "while" and (body := _BODY.search(line)):
        trips = _TRIPS.search(line)
        return (body[1],), int(trips[1]) if trips else None
    if opcode == "conditional":
        if branches := _BRANCHES.search(line):
            return [name.strip().lstrip("%") for name in branches[1].split(",")], 1
        return _TRUE_FALSE.findall(line), 1
    if opcode == "call" and (applied := _APPLIED.search(line)):
        return (applied[1],), 1
    return (), 1


def grouped(costs: Sequence[Cost]) -> list[tuple[Cost, int, int]]:
    """Groups similar costs, such as those of a model's layers: one of each group, how often they run in all, and their
    total cycles; the most expensive first. Kernels are left out.
    """
    groups: dict[tuple[str, str, str], list[Cost]] = {}
    for each in costs:
        if each.cycles is not None:
            origin = re.sub(r"\d+", "#", each.origin)
            key = (each.instruction.opcode, origin, each.instruction.made)
            groups.setdefault(key, []).append(each)
    totals = [
        (found[0], sum(each.times for each in found), total_cycles(found))
        for found in groups.values()
    ]
    return sorted(totals, key=lambda total: -total[2])
