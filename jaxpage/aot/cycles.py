"""Where the time of a program goes. For TPUs by the compiler's own estimates: the `estimated_cycles` in its HLO.

XLA annotates each fusion and copy with the cycles it expects it to take, considering bytes and flops. The estimates of
a program add up along its control flow:

- A computation that an instruction names in `calls`, such as a fusion's, is included in that instruction's estimate.
- The body of a loop counts with its known trip count, or else once.
- Of a conditional one branch runs. The cheapest one counts, since the others are for requests that ask for more; what
  the most expensive one would add is `Costs.in_other_branches`.
- Instructions without an estimate have a sentinel near 2**63, or nothing: kernels, which `tpu_schedule` covers, and the
  ends of asynchronous operations.

For GPUs, `gpu_time` estimates nanoseconds instead, which stand for cycles here.

Knows the text of optimised HLO and nothing of jax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>\S+) = (?P<made>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRUE_FALSE = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")
_APPLIED = re.compile(r"\bto_apply=%?([\w.\-]+)")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_SENTINEL = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of an instruction. `cycles`: of one execution; None for a kernel."""

    name: str
    opcode: str
    made: str  # the type of its result, including layouts
    op_name: str  # its origin, as traced
    cycles: int | None
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a program. `in_other_branches`: cycles that the most expensive branches would add to `costs`."""

    costs: tuple[Cost, ...]
    in_other_branches: int

    @property
    def cycles(self) -> int:
        """The sum, without kernels."""
        return sum((each.cycles or 0) * each.times for each in self.costs)


@dataclass(frozen=True)
class _Line:
    cost: Cost
    called: tuple[tuple[str, ...], int] | None  # computations, one of which runs; how often


@dataclass
class _Program:
    entry: str = ""
    lines: dict[str, list[_Line]] = field(default_factory=dict)


def costs_of(text: str, estimates: Mapping[str, int | None] | None = None) -> Costs:
    """`text`: a compiled program, `compiled.as_text()`. Instructions that cost nothing are left out.

    `estimates`: of the instructions that cost something, by name, instead of those in the text; None for a kernel.
    """
    program = _parse(text, estimates)
    return _walk(program, program.entry, 1)


def _parse(text: str, estimates: Mapping[str, int | None] | None) -> _Program:
    program, lines = _Program(), []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = program.lines.setdefault(head["name"], [])
            if head["entry"]:
                program.entry = head["name"]
        elif found := _INSTRUCTION.match(line):
            lines.append(_line(line, found, estimates))
    return program


def _line(line: str, found: re.Match[str], estimates: Mapping[str, int | None] | None) -> _Line:
    cycles, op_name = _CYCLES.search(line), _OP_NAME.search(line)
    estimate = int(cycles[1]) if cycles else 0
    cost = Cost(
        name=found["name"],
        opcode=found["opcode"],
        made=found["made"],
        op_name=op_name[1] if op_name else found["name"],
        cycles=None if _KERNEL in line else estimate if estimate < _SENTINEL else 0,
    )
    if estimates is not None:
        cost = replace(cost, cycles=estimates.get(cost.name, 0))
    return _Line(cost, _called(line, found["opcode"]))


def _called(line: str, opcode: str) -> tuple[tuple[str, ...], int] | None:
    if opcode == "while" and (body := _BODY.search(line)):
        trips = _TRIPS.search(line)
        return (body[1],), int(trips[1]) if trips else 1
    if opcode == "conditional":
        if branches := _BRANCHES.search(line):
            return tuple(name.strip().lstrip("%") for name in branches[1].split(",")), 1
        return tuple(_TRUE_FALSE.findall(line)), 1
    if opcode == "call" and (applied := _APPLIED.search(line)):
        return (applied[1],), 1
    return None


def _walk(program: _Program, name: str, times: int) -> Costs:
    """The costs of a computation that runs `times` times."""
    costs, others = [], 0
    for line in program.lines.get(name, ()):
        if line.called is None:
            if line.cost.cycles != 0:
                costs.append(replace(line.cost, times=times))
            continue
        names, trips = line.called
        branches = sorted((_walk(program, each, times * trips) for each in names), key=_least)
        costs += branches[0].costs
        dearest = max(each.cycles + each.in_other_branches for each in branches)
        others += dearest - branches[0].cycles
    return Costs(costs=tuple(costs), in_other_branches=others)


def _least(costs: Costs) -> int:
    return costs.cycles


def grouped(costs: tuple[Cost, ...]) -> Iterator[tuple[Cost, int, int]]:
    """Groups similar costs, such as those of a model's layers: one of each group, how many there are, and their total
    cycles; the most expensive first. Kernels are left out.
    """
    groups: dict[tuple[str, str, str], list[Cost]] = {}
    for each in costs:
        if each.cycles is not None:
            key = (each.opcode, re.sub(r"\d+", "#", each.op_name), each.made)
            groups.setdefault(key, []).append(each)
    totals = [
        (found[0], sum(c.times for c in found), sum((c.cycles or 0) * c.times for c in found))
        for found in groups.values()
    ]
    yield from sorted(totals, key=lambda total: -total[2])
