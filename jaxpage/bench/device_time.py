"""How long the device takes for a launch: the time of back-to-back launches, which hides dispatch latency."""

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
    """Seconds per launch in each of `samples`, and the last carry; each launch takes the previous one's result.

    A sample has as many launches as fill `at_least` seconds, which should be about 100 times the host's overhead of a
    launch. No sample but the first begins later than `within` seconds after the start. One launch, which does not
    count, comes first.
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
