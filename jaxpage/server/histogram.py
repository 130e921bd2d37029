"""Histograms for many values at a time, and vLLM's buckets for them.

prometheus_client's own histogram takes a lock and searches its buckets for each value, which costs five times as much.
Its text format is still used: see `family`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

# Seconds.
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
PHASE = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
# Counts.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEQUENCES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `largest`, which is at least 1."""
    powers = (10**exponent for exponent in range(len(str(largest))))
    return tuple(x for power in powers for x in (power, 2 * power, 5 * power) if x <= largest)


class Histogram:
    """Counts of values per bucket. One thread observes, any thread may read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]):
        """`bounds`: the upper bound of each bucket except the last, ascending."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += count * value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """((upper bound, number of values up to it) of each bucket, the sum of all values)."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts[:]), strict=True)), self._sum


def family(
    name: str, documentation: str, labels: Mapping[str, str], histogram: Histogram
) -> HistogramMetricFamily:
    """A histogram as a metric of a scrape."""
    found = HistogramMetricFamily(name, documentation, labels=[*labels])
    found.add_metric([*labels.values()], *histogram.read())
    return found


def family_by(
    label: str,
    name: str,
    documentation: str,
    labels: Mapping[str, str],
    histograms: Mapping[str, Histogram],
) -> HistogramMetricFamily:
    """The same with one histogram per value of a further label."""
    found = HistogramMetricFamily(name, documentation, labels=[*labels, label])
    # A copy: other threads may add to it.
    for value, histogram in list(histograms.items()):
        found.add_metric([*labels.values(), value], *histogram.read())
    return found
