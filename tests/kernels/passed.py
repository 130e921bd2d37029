"""Slow tests of kernels that passed: a JSON file for each file of tests, in `tests/kernels/records`.

They interpret kernels, which takes seconds each and always ends alike while the code, the tests and the packages are
the same. With `--unless-passed` pytest leaves those out; `.ci/run` does. Each has its turn once in 90 days anyway.
`python -m tests.kernels.passed` runs the tests of files that have changed and writes their records anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

import pytest

from tests.aot import sources
from tests.aot.evidence import is_due
from tests.aot.sources import Sources

FOLDER = Path(__file__).parent / "records"


@dataclass(frozen=True, kw_only=True)
class Record:
    """sources: what the tests depend on. tests: the ids of all that passed."""

    sources: Sources
    tests: frozenset[str]


class Recorder:
    """A plugin of pytest that notes which tests passed."""

    def __init__(self):
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def holds(test: str, day: date) -> bool:
    """Whether the test with this id passed as it is now, and it is not its turn to run again."""
    record = _current(test.partition("::")[0])
    return record is not None and test in record.tests and not is_due("kernels", "", test, day)


def read(file: str) -> Record | None:
    """`file`: of tests, relative to the root."""
    path = _path(file)
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    made_of = Sources(modules=tuple(kept["modules"]), hash=kept["hash"])
    return Record(sources=made_of, tests=frozenset(f"{file}::{test}" for test in kept["tests"]))


def write(file: str, record: Record) -> None:
    kept = dataclasses.asdict(record.sources)
    tests = sorted(test.removeprefix(f"{file}::") for test in record.tests)
    FOLDER.mkdir(exist_ok=True)
    _path(file).write_text(json.dumps(kept | {"tests": tests}, indent=1) + "\n")


def files() -> list[str]:
    """The files of tests that this environment can run: those of Hopper kernels need a jax that has them."""
    from pallas_kernels.hopper import unsupported_jax

    ours = sorted(Path(__file__).parent.glob("test_*.py"))
    of_hopper = unsupported_jax() is None
    chosen = [path for path in ours if path.stem.endswith("_gpu") == of_hopper]
    return [str(path.relative_to(sources.ROOT)) for path in chosen]


@cache
def _current(file: str) -> Record | None:
    """The record, if nothing that its tests depend on has changed."""
    record = read(file)
    return record if record is not None and record.sources.are_unchanged() else None


def _path(file: str) -> Path:
    return FOLDER / f"{Path(file).stem}.json"


def _run(file: str) -> int:
    """Run the slow tests of a file in this process, which imports what they depend on and, before, what records."""
    recorder, before = Recorder(), set(sources.of_this_process().modules)
    _path(file).unlink(missing_ok=True)
    code = pytest.main(["-q", "-m", "slow", file], plugins=[recorder])
    if code == pytest.ExitCode.OK and recorder.passed:
        modules = tuple(m for m in sources.of_this_process().modules if m not in before)
        made_of = Sources(modules=modules, hash=sources._hash(modules))
        write(file, Record(sources=made_of, tests=frozenset(recorder.passed)))
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


def main() -> int:
    parser = argparse.ArgumentParser(description="Records which slow tests of kernels pass.")
    parser.add_argument("files", nargs="*", help="only these (default: all that have changed)")
    given = parser.parse_args()
    if len(given.files) == 1:
        return _run(*given.files)
    changed = given.files or [file for file in files() if _current(file) is None]
    command = [sys.executable, "-m", "tests.kernels.passed"]
    return max((subprocess.run([*command, file]).returncode for file in changed), default=0)


if __name__ == "__main__":
    sys.exit(main())
