"""The schedule of a TPU kernel without a TPU: reads what libtpu dumps of what it compiles.

For each kernel and fusion libtpu can write its final bundles, which are what a core issues: one a cycle as long as
nothing stalls, which they do not show. A bundle has slots for several units (MXU, vector and scalar units, loads and
stores), and a second file counts those that are used. Summed by loop this is the time of an iteration.

Flags ask for the dump, `dump_variables`. libtpu reads them at the first compilation of a process, so they must be in
the environment of a process of its own, and all that it compiles goes to one folder: `take_schedules` reads and clears
it. Of a folder that is there,

    python -m jaxpage.aot.tpu_schedule FOLDER [NAME]

prints tables. Knows files and text, neither jax nor what is compiled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNITS = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE", "VLOAD:FILL", "VSTORE:SPILL", "SALU")
_SLOTS = "final_hlo-static-per-bundle-utilization.txt"
_FILE = re.compile(r"(?P<stamp>\d+)-(?P<name>.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(?:LB|LH|LE|PB|PF|CT)?\s*:[> ]*\{")
_JUMP = re.compile(r"sbr\.rel (?:\((?P<condition>!?%\w+)\) )?target = \$region(?P<region>\d+)")
_RESULT = re.compile(r"\[shape: (\w+\[[\d,]*\]), index: \d+, kind: output")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_DELAY = 4  # bundles after a jump that run whether it is taken or not


def dump_variables(folder: Path, *, flags: str = "") -> dict[str, str]:
    """Environment variables that make a process dump what it compiles to `folder`, beside other `flags` of libtpu.

    The dump takes libtpu no noticeable time.
    """
    dumping = {
        "xla_jf_dump_to": folder,
        "xla_jf_dump_llo_pass_label_regex": "final_.*",  # all passes are tens of megabytes a kernel
        "xla_jf_dump_llo_text": "true",
        "xla_jf_dump_llo_html": "false",
        "xla_jf_dump_hlo_text": "false",
    }
    ours = (f"--{name}={value}" for name, value in dumping.items())
    return {"LIBTPU_INIT_ARGS": " ".join([*flags.split(), *ours])}


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop's body, or the whole program.

    own: bundles in no loop within; least: of these, on the shortest way through all that may be jumped over. trips: how
    often it runs, where the program says a number. slots: used by `own` bundles, by unit.
    """

    begin: int  # the number of its first bundle
    own: int
    least: int
    trips: int | None = None
    slots: dict[str, int] = field(default_factory=dict)
    num_starts: int = 0  # of DMAs
    num_waits: int = 0
    inner: tuple[Loop, ...] = ()

    @classmethod
    def of(cls, values: dict[str, Any]) -> Loop:
        """The inverse of `dataclasses.asdict`."""
        inner = tuple(cls.of(each) for each in values["inner"])
        plain: dict[str, Any] = {**values, "inner": inner}
        return cls(**plain)

    @property
    def multiplies(self) -> bool:
        """Whether it or a loop within uses the MXU."""
        return self.slots.get("MXU", 0) > 0 or any(each.multiplies for each in self.inner)

    @property
    def bundles(self) -> int:
        """Of an iteration: loops within run as often as they say, else once, and nothing is jumped over."""
        return self.own + sum((each.trips or 1) * each.bundles for each in self.inner)

    @property
    def usual(self) -> int:
        """Of an iteration that jumps over what it may: the least of its own, and of the loops within that multiply."""
        within = ((each.trips or 1) * each.usual for each in self.inner if each.multiplies)
        return self.least + sum(within)

    def used(self, unit: str) -> int:
        """Slots of a unit in such an iteration."""
        within = sum((each.trips or 1) * each.used(unit) for each in self.inner)
        return self.slots.get(unit, 0) + within


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Of a kernel or a fusion. capacity: slots of a bundle, by unit."""

    name: str  # of the instruction in the HLO
    results: tuple[str, ...]  # "bf16[64,8,128]"
    program: Loop
    capacity: dict[str, int]

    @property
    def main_loops(self) -> tuple[Loop, ...]:
        """The outermost loops that multiply; the program if there is none."""
        return tuple(each for each in self.program.inner if each.multiplies) or (self.program,)


def take_schedules(folder: Path, names: Sequence[str]) -> list[Schedule]:
    """Of the instructions of these names that were dumped there. The folder is cleared."""
    found = list(schedules(folder, names))
    for path in folder.iterdir():
        path.unlink()
    return found


def schedules(folder: Path, names: Sequence[str] = ()) -> Iterator[Schedule]:
    """All, or those of these names, whatever their number, in the order in which they were compiled."""
    for path in sorted(folder.glob("*-final_bundles.txt")):
        file = _FILE.match(path.name)
        if file is None or (names and base_name(file["name"]) not in map(base_name, names)):
            continue
        slots = next(folder.glob(f"{file['stamp']}-*-{_SLOTS}"), None)
        if slots is not None:
            yield parse(file["name"], path.read_text(), slots.read_text())


def base_name(instruction: str) -> str:
    """Without the number by which XLA tells instructions apart; alike ones are compiled, and dumped, once."""
    return re.sub(r"\.\d+$", "", instruction)


@dataclass(frozen=True)
class _Jump:
    at: int
    to: int
    condition: str | None  # such as "!%p12"


def parse(name: str, bundles: str, slots: str) -> Schedule:
    """Of the text of the two files."""
    units, capacity, used = _slots(slots)
    text = _bundles(bundles)
    jumps = list(_jumps(text))
    loops: dict[int, _Jump] = {}  # by begin the jump that closes each
    for jump in jumps:
        if jump.to <= jump.at:
            loops[jump.to] = jump
    program = _Program("".join(text), text, used, jumps, loops)
    whole = program.loop(0, len(text), None)
    return Schedule(
        name=name,
        results=tuple(_RESULT.findall(text[0])) if text else (),
        program=whole,
        capacity=dict(zip(units, capacity, strict=True)),
    )


def _slots(text: str) -> tuple[list[str], list[int], list[dict[str, int]]]:
    """Units, how many each has, and of each bundle how many it uses."""
    _, units, capacity, _, *rows = text.splitlines()
    names = [name.strip() for name in units.split(",")]
    used = (dict(zip(names, map(int, row.split()), strict=True)) for row in rows if row.strip())
    return names, [int(x) for x in capacity.split()], list(used)


def _bundles(text: str) -> list[str]:
    """A bundle may go on in further lines."""
    found: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            found.append(line)
        elif found:
            found[-1] += line
    return found


def _jumps(bundles: list[str]) -> Iterator[_Jump]:
    """A region begins where a comment says so, at a bundle or in front of one."""
    begins: dict[str, int] = {}
    for number, text in enumerate(bundles):
        for region in _REGION.findall(text):
            begins.setdefault(region, number)
    for number, text in enumerate(bundles):
        for jump in _JUMP.finditer(text):
            if (to := begins.get(jump["region"])) is not None:
                yield _Jump(number, to, jump["condition"])


@dataclass(frozen=True)
class _Program:
    text: str
    bundles: list[str]
    used: list[dict[str, int]]
    jumps: list[_Jump]
    loops: dict[int, _Jump]

    def loop(self, begin: int, end: int, closed_by: _Jump | None) -> Loop:
        """Of the bundles [begin, end)."""
        own, inner, at = [], [], begin
        while at < end:
            closing = self.loops.get(at)
            if closing is None or closing is closed_by:
                own.append(at)
                at += 1
                continue
            inner_end = min(closing.at + 1 + _DELAY, end)
            inner.append(self.loop(at, inner_end, closing))
            at = inner_end
        text = [self.bundles[i] for i in own]
        slots: dict[str, int] = {}
        for number in own:
            for unit, used in (self.used[number] if number < len(self.used) else {}).items():
                slots[unit] = slots.get(unit, 0) + used
        return Loop(
            begin=begin,
            own=len(own),
            least=self.least(set(own), begin, end),
            trips=_trips(self.text, closed_by.condition) if closed_by else None,
            slots={unit: used for unit, used in slots.items() if used},
            num_starts=sum(len(re.findall(r"= dma\.(?!done)", each)) for each in text),
            num_waits=sum(each.count("dma.done.wait") for each in text),
            inner=tuple(inner),
        )

    def least(self, own: set[int], begin: int, end: int) -> int:
        """Own bundles on the shortest way from one end to the other, by jumps ahead."""
        ahead: dict[int, int] = {}
        for jump in self.jumps:
            if begin <= jump.at < jump.to <= end:
                ahead[jump.at] = max(jump.to, ahead.get(jump.at, 0))
        least = [0] * (end + 1)
        for number in range(end - 1, begin - 1, -1):
            least[number] = (number in own) + least[number + 1]
            if to := ahead.get(number):
                delay = min(_DELAY, to - number - 1)
                least[number] = min(least[number], (number in own) + delay + least[to])
        return least[begin]


def _trips(program: str, condition: str | None) -> int | None:
    """Of a loop that goes on until a counter has come from one number to another. Names are those of one value each."""
    if not condition or not condition.startswith("!"):
        return None
    test = re.search(rf"{condition[1:]} = scmp\.ge\.s32\.totalorder (%\w+), (\d+)\b", program)
    step = test and re.search(rf"{test[1]} = sadd\.s32 (\d+), (%\w+)", program)
    start = step and re.search(rf"{step[2]} = sphi (%?\w+), ", program)
    if not (test and step and start):
        return None
    first = start[1]
    if first.startswith("%"):
        constant = re.search(rf"{first} = smov (?:\(!?%\w+\), )?(\d+)\b", program)
        if constant is None:
            return None
        first = constant[1]
    return -(-(int(test[2]) - int(first)) // int(step[1]))


def table(schedule: Schedule) -> str:
    """Bundles and slots by loop."""
    units = [unit for unit in UNITS if unit in schedule.capacity]
    head = f"{'loop, from bundle':<22}{'trips':>6}{'bundles':>9}{'own':>7}{'least':>7}{'DMAs':>6}{'waits':>6}"
    lines = [f"{schedule.name}", head + "".join(f"{unit:>14}" for unit in units)]

    def add(loop: Loop, depth: int) -> None:
        label = "  " * depth + (f"{loop.begin:#x}" if depth else "program")
        numbers = (
            f"{loop.bundles:>9}{loop.own:>7}{loop.least:>7}{loop.num_starts:>6}{loop.num_waits:>6}"
        )
        cells = []
        for unit in units:
            used = loop.slots.get(unit, 0)
            share = used / max(1, schedule.capacity[unit] * loop.own)
            cells.append(f"{used:>8} {share:>5.0%}")
        trips = "" if loop.trips is None else loop.trips
        lines.append(f"{label:<22}{trips:>6}{numbers}" + "".join(cells))
        for each in loop.inner:
            add(each, depth + 1)

    add(schedule.program, 0)
    return "\n".join(lines)


def main(folder: str, *names: str) -> None:
    for schedule in schedules(Path(folder), names):
        print(table(schedule), end="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
