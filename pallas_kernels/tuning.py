"""Shared by the operations' `tune.py`: measures which of a kernel's tile sizes are the fastest. `tile_sizes.py` has the
files of results. Knows no details of kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from pallas_kernels.hopper import unsupported_ptxas_here, unsupported_reason_on
from pallas_kernels.tile_sizes import Sizes, write

# Times closer than this ratio count as equal: neither measured times nor counted bundles are more precise.
EQUAL = 1.03
SAMPLES = 9
SAMPLE_SECONDS = 5e-3  # of work: dispatch, 0.1 ms and more, counts only once per sample
MOST_LAUNCHES = 50  # in flight at once, with their results


S = TypeVar("S", bound=Sizes)
W = TypeVar("W")  # the arguments of one measurement


def fastest(
    start: S,
    stages: Iterable[tuple[Iterable[W], Mapping[str, Sequence[int]]]],
    seconds: Callable[[S, W], float],
) -> tuple[S, dict[str, float]]:
    """The sizes of the fastest candidates, and the seconds of all by name: "tile_kv=64 stages=3".

    start: the initial sizes, a frozen dataclass. stages: works, and the values to try for the fields that matter to
    them, all combinations; each stage starts with the best sizes of the previous ones, so that the number of candidates
    is a sum, not a product. seconds: of a call with these sizes and this work; a candidate for which it raises
    RuntimeError or ValueError (too much shared memory, no such tile) is left out. A candidate's time is the geometric
    mean over the works, so that short ones count as much as long ones. The sizes so far stay if they are within `EQUAL`
    of the fastest. Raises RuntimeError if no candidate is left.
    """
    best, found = start, {}
    for works, values in stages:
        prepared = list(works)
        times: dict[S, float] = {}
        for chosen in itertools.product(*values.values()):
            changes = dict(zip(values, chosen, strict=True))
            name = " ".join(f"{key}={x}" for key, x in changes.items())
            try:
                sizes: S = dataclasses.replace(best, **changes)
                of_works = [seconds(sizes, work) for work in prepared]
            except (RuntimeError, ValueError) as error:
                print(f"{name}: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
                continue
            found[name] = times[sizes] = statistics.geometric_mean(of_works)
            print(f"{name}: {1e3 * times[sizes]:.3f} ms", file=sys.stderr)
        if not times:
            raise RuntimeError(
                f"no candidate of {dict(values)} could be run; the reasons stand above"
            )
        fastest_time = min(times.values())
        if times.get(best, math.inf) > EQUAL * fastest_time:
            best = min(times, key=times.__getitem__)
    return best, found


def seconds_of(launch: Callable[[], Any]) -> float:
    """Median seconds of a launch on the device. `launch` starts one and returns a result to wait for.

    A sample is several launches, so that dispatch overlaps with the previous launch. `launch` itself must use more
    memory than a cache holds, in one call or alternating between calls, and reuse its result for a donated argument.
    """
    jax.block_until_ready(launch())  # compiles
    once = _sample(launch, 1)
    launches = min(MOST_LAUNCHES, max(1, round(SAMPLE_SECONDS / max(once, 1e-9))))
    return statistics.median(_sample(launch, launches) for _ in range(SAMPLES))


def _sample(launch: Callable[[], Any], launches: int) -> float:
    result, start = None, time.perf_counter()
    for _ in range(launches):
        result = launch()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / launches


def tune_here(tune: Callable[[str], tuple[Sizes, dict[str, float]]], folder: Path) -> None:
    """Measure on the available device, write its file to `folder` and print the contents.

    tune: the result of `fastest` for a platform, "gpu" or "tpu". Raises SystemExit if there is no such device.
    """
    device = jax.devices()[0]
    reason: str | None = "the kernels are for Hopper GPUs and TPUs"
    if device.platform == "gpu":
        capability = getattr(device, "compute_capability", None)
        reason = unsupported_reason_on(capability) or unsupported_ptxas_here()
    elif device.platform == "tpu":
        reason = None
    if reason:
        raise SystemExit(f"nothing to tune on {device.device_kind} ({device.platform}): {reason}")
    sizes, seconds = tune(device.platform)
    print(f"{write(device.device_kind, sizes, seconds, folder)}: {sizes}")
