"""Whole models in all their steps take an hour of two cores; so `-m "aot or slow"` is not enough to ask for them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is both `aot` and `slow` runs with `-m "aot and slow"` only."""
    if "aot and slow" in config.getoption("markexpr"):
        return
    left_out = [i for i in items if i.get_closest_marker("aot") and i.get_closest_marker("slow")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
