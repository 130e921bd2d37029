"""When a record of passed tests counts."""

from __future__ import annotations

from datetime import date, timedelta

import pytest

from tests.aot import sources
from tests.aot.evidence import DAYS
from tests.aot.sources import Sources
from tests.kernels import passed

FILE = "tests/kernels/test_one.py"
MONTH = [date(2026, 1, 1) + timedelta(days=n) for n in range(DAYS)]


@pytest.fixture
def record(tmp_path, monkeypatch) -> passed.Record:
    """Of a file with two tests, of which the first passed."""
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(passed, "FOLDER", tmp_path / "records")
    passed._current.cache_clear()
    sources._code.cache_clear()
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n")
    made_of = Sources(modules=(FILE,), hash=sources._hash((FILE,)))
    return passed.Record(sources=made_of, tests=frozenset({f"{FILE}::test_a[1]"}))


def test_a_test_that_passed_is_left_out_but_once_a_month(record):
    passed.write(FILE, record)
    assert passed.read(FILE) == record
    assert sum(not passed.holds(f"{FILE}::test_a[1]", day) for day in MONTH) == 1
    assert not any(passed.holds(f"{FILE}::test_a[2]", day) for day in MONTH)


@pytest.mark.parametrize(("change", "is_same"), [("x = 1  # one\n", True), ("x = 2\n", False)])
def test_a_record_counts_while_the_code_is_the_same(change, is_same, record):
    passed.write(FILE, record)
    (sources.ROOT / FILE).write_text(change)
    sources._code.cache_clear()
    assert any(passed.holds(f"{FILE}::test_a[1]", day) for day in MONTH) == is_same


def test_nothing_is_left_out_without_a_record(record):
    assert passed.read(FILE) is None
    assert not any(passed.holds(f"{FILE}::test_a[1]", day) for day in MONTH)


@pytest.mark.parametrize("path", sorted(passed.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_what_the_tests_depend_on_is_in_this_folder(path):
    """Not an installed copy's, whose changes would go unnoticed."""
    record = passed.read(f"tests/kernels/{path.stem}.py")
    assert record is not None
    needed = {f"tests/kernels/{path.stem}.py", "pallas_kernels/__init__.py", "tests/conftest.py"}
    assert needed <= set(record.sources.modules)
