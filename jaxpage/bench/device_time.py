"""How long the device takes for a launch: launches that follow one another, without the way there and back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

import jax

Carry = TypeVar("Carry")


def seconds(
    launch: Callable[[Carry], Carry],
    carry: Carry,
    *,
    at_least: float,
    samples: int,
    within: float = math.inf,
) -> tuple[list[float], Carry]:
    """Seconds of one launch in each of `samples`, and the last carry; each launch takes the result of the one before.

    A sample is as many launches as fill `at_least` seconds, some 100 times what a host needs to ask for a launch and
    to hear of its end. There are fewer samples, but one, where they would not begin `within` so many seconds. A launch
    comes first that does not count.
    """
    carry = jax.block_until_ready(launch(carry))
    taken: list[float] = []
    begin, launches = time.perf_counter(), 1
    while len(taken) <= samples and (len(taken) < 2 or time.perf_counter() - begin < within):
        start = time.perf_counter()
        for _ in range(launches):
            carry = launch(carry)
        carry = jax.block_until_ready(carry)
        taken.append((time.perf_counter() - start) / launches)
        launches = max(1, round(at_least / taken[0]))
    return taken[1:], carry
