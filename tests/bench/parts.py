"""What processes of their own import: parts of a suite, one that works and three that do not; and peers likewise."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from jaxpage.bench.engines import Jaxpage, Options, Peer, Work
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


class Quick(Peer):
    """Takes half a second for a token, or so it says."""

    environment = {"LC_TEST": "7"}

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        processors = len(os.sched_getaffinity(0))
        return {"variable": os.environ["LC_TEST"], "processors": str(processors)}

    def run(self, work: Work) -> tuple[float, int]:
        return 0.5 * work.num_output_tokens, work.num_output_tokens


class Short(Quick):
    def run(self, work: Work) -> tuple[float, int]:
        return 0.5, work.num_output_tokens - 1


class Broken(Quick):
    def setup(self, folder: str, options: Options) -> dict[str, str]:
        raise ValueError(f"no such folder as {folder}")

    def run(self, work: Work) -> tuple[float, int]:
        os._exit(7)


class Eager(Jaxpage):
    """Compiles what it uses, and nothing else."""

    options = {"enforce_eager": True}
