"""Parts of a suite, as processes of their own import them: one that works, and three that do not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from jaxpage.bench.results import Bar, Context, Result, measured


def peaks(context: Context) -> Iterator[Result]:
    yield measured("copy bandwidth", 2.0, "GB/s")
    yield measured("matrix product rate", 3.0, "TFLOP/s")


def echo(context: Context) -> Iterator[Result]:
    assert context.bandwidth is not None and context.matmul is not None
    yield measured("bandwidth", context.bandwidth, "B/s", Bar(">=", 1e9), tiny=context.tiny)
    yield measured("rate", context.matmul, "1/s", Bar("<=", 1e9))


def raises(context: Context) -> Iterator[Result]:
    yield measured("before", 1.0, "ms")
    raise ValueError("no such thing")


def dies(context: Context) -> Iterator[Result]:
    yield measured("before", 1.0, "ms")
    os._exit(3)


def hangs(context: Context) -> Iterator[Result]:
    yield measured("before", 1.0, "ms")
    time.sleep(600)
