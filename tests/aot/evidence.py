"""What the compilers were seen to make of each program: a JSON file for each suite and target, in `tests/aot/seen`.

A record counts as long as the program's text, the compiler and the code that looks are those that it was made with.
While the sources are those that the records were made with, no program is lowered to compare its text.
`python -m tests.aot.evidence` compiles what has changed and writes the files anew; with `--all` it compiles everything.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from tests.aot.sources import Sources

FOLDER = Path(__file__).parent / "seen"
DAYS = 90  # within which tests compile each program once, however little it changes


@dataclass(frozen=True, kw_only=True)
class Record:
    """Of one program. `found`: what was seen of the compiled program."""

    text: str  # hash of the lowered text
    observer: str  # hash of the code that looked
    found: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Of a suite's programs on a target, by name."""

    compiler: str = ""
    device: dict[str, Any] = field(default_factory=dict)
    sources: Sources | None = None
    records: dict[str, Record] = field(default_factory=dict)

    def is_of_now(self, compiler: str) -> bool:
        """Whether all records hold, because nothing that they depend on has changed."""
        is_same = compiler == self.compiler and self.sources is not None
        return is_same and self.sources.are_unchanged()

    def record_of(self, name: str, text: str, observer: str, compiler: str) -> Record | None:
        """None if there is none for these."""
        record = self.records.get(name)
        holds = record and (record.text, record.observer) == (text, observer)
        return record if holds and compiler == self.compiler else None


def read(suite: str, target: str) -> Evidence:
    path = _path(suite, target)
    if not path.exists():
        return Evidence()
    kept = json.loads(path.read_text())
    records = {name: Record(**record) for name, record in kept["programs"].items()}
    sources = kept["sources"]
    return Evidence(
        compiler=kept["compiler"],
        device=kept["device"],
        sources=sources and Sources(modules=tuple(sources["modules"]), hash=sources["hash"]),
        records=records,
    )


def write(suite: str, target: str, evidence: Evidence) -> None:
    """A line a program."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(vars(record), sort_keys=True)}"
        for name, record in sorted(evidence.records.items())
    ]
    about = {"compiler": evidence.compiler, "device": evidence.device}
    sources = dataclasses.asdict(evidence.sources) if evidence.sources else None
    head = f'{json.dumps(about)[:-1]},\n"sources": {json.dumps(sources)},\n"programs": {{\n'
    _path(suite, target).write_text(head + ",\n".join(lines) + "\n}}\n")


def is_due(suite: str, target: str, name: str, day: date) -> bool:
    """Whether it is the program's turn to be compiled although its record holds: each has one in `DAYS`."""
    number = int.from_bytes(hashlib.sha256(f"{suite} {target} {name}".encode()).digest()[:4])
    return (number - day.toordinal()) % DAYS == 0


def _path(suite: str, target: str) -> Path:
    return FOLDER / f"{suite} {target}.json".replace(" ", "-").replace(":", "-")


def main() -> None:
    from tests.aot.compiling import Mode, compile_suite
    from tests.aot.suites import calls

    parser = argparse.ArgumentParser(description="Writes what the compilers make of each program.")
    parser.add_argument("--all", action="store_true", help="compile what has not changed, too")
    parser.add_argument("--processes", type=int, default=2, help="at a time (default: 2)")
    parser.add_argument("suites", nargs="*", help="only these (default: all)")
    given = parser.parse_args()
    mode = Mode.ALL if given.all else Mode.CHANGED
    chosen = [call for call in calls() if not given.suites or call[0] in given.suites]
    for stale in set(FOLDER.glob("*.json")) - {_path(*call) for call in calls()}:
        stale.unlink()

    def renew(call: tuple[str, str]) -> str:
        seen = compile_suite(*call, mode)
        write(*call, seen.evidence)
        return f"{' '.join(call)}: {seen.num_compiled} of {len(seen.programs)} compiled, {seen.seconds:.0f} s"

    with ThreadPoolExecutor(given.processes) as pool:
        for line in pool.map(renew, chosen):
            print(line, flush=True)


if __name__ == "__main__":
    main()
