"""Tests of an operation are written once, in a class; each backend subclasses it and inherits the operation's cases."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A method's `case` is each of its class's `cases`, slow if not in `fast`; `pool` each of `pools`; and so on."""
    if metafunc.cls is None:
        return
    if "pool" in metafunc.fixturenames:
        metafunc.parametrize("pool", metafunc.cls.pools, ids=lambda pool: pool.name)
    if "format" in metafunc.fixturenames:
        metafunc.parametrize("format", metafunc.cls.formats)
    if "case" not in metafunc.fixturenames:
        return
    fast = metafunc.cls.fast
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
