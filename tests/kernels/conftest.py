"""Tests of an operation are written once, in a class; each backend subclasses it and inherits the operation's cases.

With `--unless-passed`, slow tests that passed with the same sources are left out, see `passed.py`.
"""

from __future__ import annotations

from datetime import date

import pytest

from tests.kernels import passed

_LEFT_OUT = pytest.StashKey[int]()
_SLOW_FORMATS = ("fp8_e4m3", "fp8_e5m2")  # which differ from int8 in the rounding of a number only


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A method's `case` is each of its class's `cases`, slow if not in `fast`; `pool` each of `pools`; and so on.

    Of `formats`, those of 8-bit floats are slow if `fast` leaves out anything.
    """
    if metafunc.cls is None:
        return
    if "pool" in metafunc.fixturenames:
        metafunc.parametrize("pool", metafunc.cls.pools, ids=lambda pool: pool.name)
    fast = metafunc.cls.fast
    if "format" in metafunc.fixturenames:
        slow = () if fast is None else _SLOW_FORMATS
        metafunc.parametrize(
            "format",
            [
                pytest.param(format, marks=pytest.mark.slow if format in slow else ())
                for format in metafunc.cls.formats
            ],
        )
    if "case" not in metafunc.fixturenames:
        return
    metafunc.parametrize(
        "case",
        [
            pytest.param(
                case,
                id=case.name,
                marks=() if fast is None or case.name in fast else pytest.mark.slow,
            )
            for case in metafunc.cls.cases
        ],
    )


# After the deselection by markers, so that only tests count that would run.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("unless_passed"):
        return
    left_out = {item for item in items if passed.holds(item.nodeid, date.today())}
    config.stash[_LEFT_OUT] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left_out := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{left_out} slow tests of kernels left out: they passed with the same sources"
        )
