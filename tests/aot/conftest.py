"""Whole models in all their steps take an hour of two cores; so `-m "aot or slow"` is not enough to ask for them."""

from __future__ import annotations

import sys

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is both `aot` and `slow` runs with `-m "aot and slow"` only."""
    if "aot and slow" in config.getoption("markexpr"):
        return
    left_out = [i for i in items if i.get_closest_marker("aot") and i.get_closest_marker("slow")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was compiled, and why. To import the module above would be before the settings of the root's `conftest`."""
    compiling = sys.modules.get("tests.aot.compiling")
    if compiling is None:
        return
    for (suite, target), seen in sorted(compiling.seen_so_far.items()):
        terminalreporter.write_line(
            f"{suite} {target}: {seen.num_compiled} of {len(seen.programs)} programs compiled,"
            f" {seen.num_changed} of them because they have changed, {seen.seconds:.0f} s"
        )
    if any(seen.num_changed for seen in compiling.seen_so_far.values()):
        terminalreporter.write_line(
            "programs that have changed are compiled each time until `python -m tests.aot.evidence`"
            " keeps what was seen of them"
        )
