"""A program whose result is compared with what it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpage.bench.results import Bar

BAR = Bar("<=", 1e-2)  # relative, in bfloat16
BAR_FLOAT32 = Bar("<=", 1e-3)  # relative; products of numbers rounded to bfloat16 exceed it
SAME = Bar("<=", 0)


@dataclass
class Check:
    """A program to check: `run` is compiled for `arguments`, `error` computes the error of its result."""

    name: str
    run: Callable[..., Any]
    arguments: tuple
    error: Callable[[Any], float]
    bar: Bar = BAR
    unit: str = ""
