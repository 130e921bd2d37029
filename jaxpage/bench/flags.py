"""Checks of a bench's flags, before a checkpoint is written or an engine built."""

from __future__ import annotations

import math
from typing import Any


def check_least(bench: Any, **least: int) -> None:
    """Raise ValueError for the first flag that is below its least value. Each flag is a number, a tuple of numbers, or
    None.
    """
    for name, lowest in least.items():
        value = getattr(bench, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if value is not None and not (numbers and min(numbers) >= lowest):
            given = ", ".join(map(str, numbers)) or "none"
            raise ValueError(f"{flag_of(name)} must be at least {lowest}, got {given}")


def check_above_zero(bench: Any, name: str) -> None:
    """Raise ValueError if the flag is no finite number above 0."""
    value = getattr(bench, name)
    if not 0 < value < math.inf:  # NaN is refused too
        raise ValueError(f"{flag_of(name)} must be a finite number above 0, got {value}")


def flag_of(name: str) -> str:
    """As on the command line."""
    return f"--{name.replace('_', '-')}"
