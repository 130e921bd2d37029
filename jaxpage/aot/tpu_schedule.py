"""The schedule of a TPU kernel without a TPU: reads what libtpu dumps of what it compiles.

For each kernel and fusion libtpu can write its final bundles, which are what a core issues: one a cycle as long as
nothing stalls, which they do not show. A bundle has slots for several units (MXU, vector and scalar units, loads and
stores), and a second file counts those that are used. Summed by region this is the time of an iteration.

Flags ask for the dump, `dump_variables`. libtpu reads them at the first compilation of a process, so they must be in
the environment of a process of its own, and all that it compiles goes to one folder: `take_schedules` reads and clears
it. Of a folder that is there,

    python -m jaxpage.aot.tpu_schedule FOLDER [NAME]

prints tables. Knows files and text, neither jax nor what is compiled.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

UNITS = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE", "VLOAD:FILL", "VSTORE:SPILL", "SALU")
_SLOTS = "final_hlo-static-per-bundle-utilization.txt"
_FILE = re.compile(r"(?P<stamp>\d+)-(?P<name>.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(?:LB|LH|LE|PB|PF|CT)?\s*:[> ]*\{")
_JUMP = re.compile(r"sbr\.rel (?:\((?P<condition>!?%\w+)\) )?target = \$region(?P<region>\d+)")
_RESULT = re.compile(r"\[shape: (\w+\[[\d,]*\]), index: \d+, kind: output")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
# Bundles after a jump that run whether it is taken or not, where no comment says that a region begins. On a TPU7x they
# are fewer after a jump ahead, and may be more after one that closes a loop.
_DELAY = 4
_MOST_DELAY = 7


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
class Region:
    """The whole program, a loop's body, or a *branch*: bundles that a jump ahead may leave out.

    own: bundles in no region within, which run whenever it does. trips: how often a loop runs, where the program says a
    number. slots: used by `own` bundles, by unit. condition: of a branch's jump; "!%p1" leaves it out unless %p1 holds.
    """

    begin: int  # the number of its first bundle
    own: int
    is_branch: bool = False
    trips: int | None = None
    condition: str | None = None
    slots: dict[str, int] = field(default_factory=dict)
    num_starts: int = 0  # of DMAs
    num_waits: int = 0
    inner: tuple[Region, ...] = ()

    @classmethod
    def of(cls, values: dict[str, Any]) -> Region:
        """The inverse of `dataclasses.asdict`."""
        inner = tuple(cls.of(each) for each in values["inner"])
        plain: dict[str, Any] = {**values, "inner": inner}
        return cls(**plain)

    @property
    def branches(self) -> tuple[Region, ...]:
        """The outermost."""
        return tuple(each for each in self.inner if each.is_branch)

    @property
    def loops(self) -> tuple[Region, ...]:
        """The outermost, those in branches too."""
        nested = ((each.loops if each.is_branch else (each,)) for each in self.inner)
        return tuple(itertools.chain.from_iterable(nested))

    @property
    def multiplies(self) -> bool:
        """Whether it or a region within uses the MXU."""
        return self.slots.get("MXU", 0) > 0 or any(each.multiplies for each in self.inner)

    @property
    def starts(self) -> bool:
        """Whether it starts DMAs, not counting loops within."""
        return self.num_starts > 0 or any(each.starts for each in self.branches)

    @property
    def waits(self) -> bool:
        """Whether it waits for some, likewise."""
        return self.num_waits > 0 or any(each.waits for each in self.branches)

    @property
    def straight(self) -> int:
        """Bundles in no loop within, branches included."""
        return self.own + sum(each.straight for each in self.branches)

    @property
    def bundles(self) -> int:
        """How many an iteration runs: loops within run as often as they say, else once, and nothing is jumped over."""
        return self.own + sum((each.trips or 1) * each.bundles for each in self.inner)

    def used(self, unit: str) -> int:
        """Slots of a unit in an iteration, counted as `bundles` are."""
        within = sum((each.trips or 1) * each.used(unit) for each in self.inner)
        return self.slots.get(unit, 0) + within


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule of a kernel or a fusion. capacity: slots of a bundle, by unit."""

    name: str  # of the instruction in the HLO
    results: tuple[str, ...]  # "bf16[64,8,128]"
    program: Region
    capacity: dict[str, int]

    @property
    def main_loops(self) -> tuple[Region, ...]:
        """The outermost loops that multiply; the program if there is none."""
        return tuple(each for each in self.program.loops if each.multiplies) or (self.program,)


def take_schedules(folder: Path, names: Sequence[str]) -> list[Schedule]:
    """Read the schedules of the instructions of these names that were dumped in `folder`, and empty the folder."""
    found = list(schedules(folder, names))
    for path in folder.iterdir():
        path.unlink()
    return found


def schedules(folder: Path, names: Sequence[str] = ()) -> Iterator[Schedule]:
    """All schedules, or those of these names, whatever their number, in the order in which they were compiled."""
    for path in sorted(folder.glob("*-final_bundles.txt")):
        file = _FILE.match(path.name)
        if file is None or (names and base_name(file["name"]) not in map(base_name, names)):
            continue
        slots = next(folder.glob(f"{file['stamp']}-*-{_SLOTS}"), None)
        if slots is not None:
            yield parse(file["name"], path.read_text(), slots.read_text())


def base_name(instruction: str) -> str:
    """A name without the number by which XLA tells instructions apart; alike ones are compiled, and dumped, once."""
    return re.sub(r"\.\d+$", "", instruction)


@dataclass(frozen=True)
class _Jump:
    at: int
    to: int
    end: int  # the first bundle that does not run if it is taken
    condition: str | None  # such as "!%p12"


def parse(name: str, bundles: str, slots: str) -> Schedule:
    """The schedule in the texts of libtpu's two files."""
    units, capacity, used = _slots(slots)
    text = _bundles(bundles)
    program = _Program("".join(text), text, used, list(_jumps(text)))
    return Schedule(
        name=name,
        results=tuple(_RESULT.findall(text[0])) if text else (),
        program=program.region(0, len(text)),
        capacity=dict(zip(units, capacity, strict=True)),
    )


def _slots(text: str) -> tuple[list[str], list[int], list[dict[str, int]]]:
    """The units, how many slots each has, and how many of them each bundle uses."""
    _, units, capacity, _, *rows = text.splitlines()
    names = [name.strip() for name in units.split(",")]
    used = (dict(zip(names, map(int, row.split()), strict=True)) for row in rows if row.strip())
    return names, [int(x) for x in capacity.split()], list(used)


def _bundles(text: str) -> list[str]:
    """The text of each bundle, which may go on in further lines."""
    found: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            found.append(line)
        elif found:
            found[-1] += line
    return found


def _jumps(bundles: list[str]) -> Iterator[_Jump]:
    """The jumps to regions. A region begins where a comment says so, at a bundle or in front of one."""
    begins: dict[str, int] = {}
    for number, text in enumerate(bundles):
        for region in _REGION.findall(text):
            begins.setdefault(region, number)
    for number, text in enumerate(bundles):
        for jump in _JUMP.finditer(text):
            if (to := begins.get(jump["region"])) is not None:
                most = _DELAY if number < to else _MOST_DELAY
                ends = range(number + 2, min(number + 2 + most, len(bundles)))
                end = next((i for i in ends if _REGION.search(bundles[i])), number + 1 + _DELAY)
                yield _Jump(number, to, end, jump["condition"])


@dataclass(frozen=True)
class _Program:
    text: str
    bundles: list[str]
    used: list[dict[str, int]]
    jumps: list[_Jump]

    @cached_property
    def _closing(self) -> dict[int, _Jump]:
        """The jump that closes each loop, by the loop's first bundle."""
        return {jump.to: jump for jump in self.jumps if jump.to <= jump.at}

    @cached_property
    def _ahead(self) -> dict[int, _Jump]:
        """The jump that leaves out each branch, by the branch's first bundle."""
        ahead = (jump for jump in self.jumps if jump.end < jump.to)
        return {jump.end: jump for jump in ahead if not self._is_of_loop(jump)}

    def _is_of_loop(self, jump: _Jump) -> bool:
        """Whether a jump ahead leaves out nothing but a loop that may run 0 times."""
        for begin in range(jump.end, jump.end + 1 + _DELAY):
            if any(other.at == begin for other in self.jumps):
                return False
            if closing := self._closing.get(begin):
                is_all = jump.to <= closing.end
                return is_all and _trips(self.text, closing.condition) is None
        return False

    def region(self, begin: int, end: int, jump: _Jump | None = None) -> Region:
        """The region of bundles [begin, end). jump: closes the loop, or leaves the branch out; None for the program."""
        own, inner, at = [], [], begin
        while at < end:
            within = self._region_at(at, begin, end, jump)
            if within is None:
                own.append(at)
                at += 1
                continue
            at, found = within
            inner.append(found)
        text = [self.bundles[i] for i in own]
        slots: dict[str, int] = {}
        for number in own:
            for unit, used in (self.used[number] if number < len(self.used) else {}).items():
                slots[unit] = slots.get(unit, 0) + used
        is_loop = jump is not None and jump.to <= jump.at
        return Region(
            begin=begin,
            own=len(own),
            is_branch=jump is not None and not is_loop,
            trips=_trips(self.text, jump.condition) if jump and is_loop else None,
            condition=jump.condition if jump and not is_loop else None,
            slots={unit: used for unit, used in slots.items() if used},
            num_starts=sum(len(re.findall(r"= dma\.(?!done)", each)) for each in text),
            num_waits=sum(each.count("dma.done.wait") for each in text),
            inner=tuple(inner),
        )

    def _region_at(
        self, at: int, begin: int, end: int, within: _Jump | None
    ) -> tuple[int, Region] | None:
        """The end of the outermost region that begins at a bundle of [begin, end), and the region."""
        ahead = self._ahead.get(at)
        if ahead is not None and begin <= ahead.at and ahead.to <= end:
            return ahead.to, self.region(at, ahead.to, ahead)
        closing = self._closing.get(at)
        if closing is not None and closing is not within:
            inner_end = min(closing.end, end)
            return inner_end, self.region(at, inner_end, closing)
        return None


def _trips(program: str, condition: str | None) -> int | None:
    """How often a loop runs whose counter goes from one number to another; None: unknown. Each name has one value."""
    if not condition or not condition.startswith("!"):
        return None
    test = re.search(rf"{condition[1:]} = scmp\.ge\.s32\.totalorder (%\w+), (\d+)\b", program)
    step = test and _definition(program, test[1], r"sadd\.s32 (\d+), (%\w+)")
    start = step and _definition(program, step[2], r"sphi (%?\w+), ")
    if not (test and step and start):
        return None
    first = start[1]
    if first.startswith("%"):
        constant = re.search(rf"{first} = smov (?:\(!?%\w+\), )?(\d+)\b", program)
        if constant is None:
            return None
        first = constant[1]
    return -(-(int(test[2]) - int(first)) // int(step[1]))


def _definition(program: str, name: str, pattern: str) -> re.Match[str] | None:
    """The match of `name = pattern`, or of the value that was in the scalar memory before it had this name."""
    if found := re.search(rf"{name} = {pattern}", program):
        return found
    slot = re.search(rf"{name} = sld \[smem:\[#(\w+_spill)\]\]", program)
    stored = re.findall(rf"sst \[smem:\[#{slot[1]}\]\] (%\w+)", program) if slot else []
    return re.search(rf"{stored[0]} = {pattern}", program) if len(stored) == 1 else None


def table(schedule: Schedule) -> str:
    """Bundles and slots by region. Branches begin with a question mark."""
    units = [unit for unit in UNITS if unit in schedule.capacity]
    head = f"{'from bundle':<26}{'trips':>6}{'bundles':>9}{'own':>7}{'DMAs':>6}{'waits':>6}"
    lines = [f"{schedule.name}", head + "".join(f"{unit:>14}" for unit in units)]

    def add(region: Region, depth: int) -> None:
        label = f"{'?' if region.is_branch else ''}{region.begin:#x}" if depth else "program"
        numbers = f"{region.bundles:>9}{region.own:>7}{region.num_starts:>6}{region.num_waits:>6}"
        cells = []
        for unit in units:
            used = region.slots.get(unit, 0)
            share = used / max(1, schedule.capacity[unit] * region.own)
            cells.append(f"{used:>8} {share:>5.0%}")
        trips = "" if region.trips is None else region.trips
        lines.append(f"{'  ' * depth + label:<26}{trips:>6}{numbers}" + "".join(cells))
        for each in region.inner:
            add(each, depth + 1)

    add(schedule.program, 0)
    return "\n".join(lines)


def main(folder: str, *names: str) -> None:
    for schedule in schedules(Path(folder), names):
        print(table(schedule), end="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
