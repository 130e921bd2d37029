"""Shared by the operations' `tune.py`: measures tile sizes on a kind of device, and stores them in files.

An operation has the sizes of its kernel in a frozen dataclass of positive integers, `TileSizes`, with defaults for
devices without measurements, and a folder `tuned/` with a file for each kind of device measured: `nvidia_h200.json`,
`tpu_v6_lite.json`. Knows no details of kernels. How a kernel divides its sums is never a size: a row's result must not
depend on the other rows, or on the device within a platform.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import jax

from pallas_kernels.hopper import unsupported_ptxas_here, unsupported_reason_on

# Times closer than this ratio count as equal: neither measured times nor counted bundles are more precise.
EQUAL = 1.03
SAMPLES = 9
SAMPLE_SECONDS = 5e-3  # of work: dispatch, 0.1 ms and more, counts only once per sample
MOST_LAUNCHES = 50  # in flight at once, with their results


class Sizes(Protocol):
    """A frozen dataclass: an operation's `TileSizes`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


S = TypeVar("S", bound=Sizes)
W = TypeVar("W")  # the arguments of one measurement


def path_of(device_kind: str, folder: Path) -> Path:
    """device_kind as in jax: "NVIDIA H200", "TPU v6 lite"."""
    return folder / f"{'_'.join(device_kind.lower().split())}.json"


def read(kind: type[S], device_kind: str, folder: Path) -> S:
    """The sizes measured for a kind of device; without a measurement the defaults of `kind`, a class of sizes.

    Raises ValueError unless the file has exactly the fields of `kind`, with positive integers.
    """
    path = path_of(device_kind, folder)
    if not path.exists():
        return kind()
    sizes = json.loads(path.read_text(encoding="utf-8"))["sizes"]
    names = [field.name for field in dataclasses.fields(kind)]
    if set(sizes) != set(names) or not all(type(x) is int and x > 0 for x in sizes.values()):
        raise ValueError(
            f"{path}: sizes are {sizes}; wanted are positive numbers for {names}. Measure again, or remove the file"
        )
    return kind(**sizes)


def write(
    device_kind: str,
    sizes: Sizes,
    seconds: Mapping[str, float],
    folder: Path,
    source: str = "measured",
) -> Path:
    """Write sizes for `read`, with their origin. seconds: of each candidate, from `fastest`."""
    path = path_of(device_kind, folder)
    path.parent.mkdir(exist_ok=True)
    content = {
        "device_kind": device_kind,
        "jax": jax.__version__,
        "source": source,
        "date": datetime.date.today().isoformat(),
        "sizes": dataclasses.asdict(sizes),
        "seconds": dict(seconds),
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


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
    """Measure on the available device, write its file and print the contents.

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
