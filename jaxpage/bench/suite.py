"""`jaxpage bench suite`: everything that has a bar on an H200, checked and measured in one call.

Each part runs in a separate process, so that one that crashes, hangs or fills the device's memory does not affect the
results of others. Does not import jax.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxpage.bench.results import Context, Result, error_summary, failed, missing, table_of_bars
from jaxpage.bench.subprocess_rpc import ROOT, RemoteObject

# In the order in which they run: peak rates, which bars refer to; speed; each kernel in all its variants; and what may
# be left out where time is short.
PARTS = {  # name: the function, and the seconds it may take while other parts wait
    "peaks": ("jaxpage.bench.peaks:measure", 120),
    "decode": ("jaxpage.bench.attention:decode", 130),
    "prefill": ("jaxpage.bench.attention:prefill", 110),
    "steps": ("jaxpage.bench.serving:steps", 240),
    "table": ("jaxpage.bench.serving:table", 120),
    "warm-up": ("jaxpage.bench.serving:warm_up", 180),
    "kernels": ("jaxpage.bench.kernels:measure", 240),
    "long": ("jaxpage.bench.attention:long", 150),
}
PEAKS = "peaks"
RATES = {"GB/s": ("bandwidth", 1e9), "TFLOP/s": ("matmul", 1e12)}  # of `Context`, by unit
SHORTEST = 10  # seconds: with less time left no part starts
# By default JAX allocates three quarters of the device's memory at once, but torch's processes need some too.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, kw_only=True)
class SuiteBench:
    """Check and measure everything that has a bar, part by part."""

    json: Path | None = None  # all results go to this file, which is updated after each
    # peaks, decode, prefill, steps, table, warm-up, kernels, long; none: all. Peaks are always measured.
    only: tuple[str, ...] = ()
    tiny: bool = False  # sizes for a CPU, to check that everything runs
    time_limit: float = 570  # seconds for all parts together
    commit: str | None = None  # the measured commit, if this folder is not a git checkout


class Part:
    """Runs in a part's process: yields its results, one by one."""

    def start(self, target: str, context: Context) -> dict[str, str]:
        """Returns the device it runs on; `next` returns the results."""
        import jax

        device = jax.devices()[0]
        if device.platform == "cpu" and not context.tiny:
            raise RuntimeError(
                "jax finds no accelerator, and on a CPU only --tiny finishes in time"
            )
        module, name = target.split(":")
        function = getattr(importlib.import_module(module), name)
        self._results: Iterator[Result] = function(context)
        return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}

    def next(self) -> Result | None:
        return next(self._results, None)


def main(bench: SuiteBench) -> int:
    """Run the parts, print each result as it comes and all bars at the end. 1 if something failed.

    Raises ValueError for an unknown part.
    """
    if unknown := set(bench.only) - set(PARTS):
        raise ValueError(f"no part {sorted(unknown)}; there are {', '.join(PARTS)}")
    report = Report(bench)
    with tempfile.TemporaryDirectory(prefix="jaxpage-suite-") as folder:
        context = Context(tiny=bench.tiny, folder=folder)
        chosen = [part for part in PARTS if part in (PEAKS, *(bench.only or PARTS))]
        for part in chosen:
            for result in _run(part, context, report, waiting=part != chosen[-1]):
                report.add(part, result)
                if part == PEAKS and result.value is not None:
                    name, unit = RATES[result.unit]
                    context = replace(context, **{name: result.value * unit})
    # The last parts have the most results, and long logs are truncated at the beginning.
    ordered = sorted(report.results, key=lambda found: -list(PARTS).index(found[0]))
    print("\n" + table_of_bars(ordered), flush=True)
    return int(any(result.passed is False for _, result in report.results))


def _run(part: str, context: Context, report: Report, *, waiting: bool) -> Iterator[Result]:
    """A part's results, until it is done, dead or out of time. The last part may use all the time that is left."""
    target, limit = PARTS[part]
    left = report.seconds_left()
    if left < SHORTEST:
        yield missing("all of it", "", f"only {left:.0f} s were left; name it with --only")
        return
    limit = min(limit, left) if waiting else left
    start = time.monotonic()
    with RemoteObject("jaxpage.bench.suite:Part", environment=ENVIRONMENT) as process:
        try:
            report.device = process.ask("start", target, context, timeout=limit)

            def ask() -> Result | None:
                return process.ask("next", timeout=max(0.0, start + limit - time.monotonic()))

            yield from iter(ask, None)
        except TimeoutError:
            yield failed("the rest of it", f"stopped after {limit:.0f} s")
        except RuntimeError as error:
            print(error, flush=True)
            yield failed("the rest of it", error_summary(error))
    print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)


class Report:
    """All results so far, with their parts; printed and written as they arrive."""

    def __init__(self, bench: SuiteBench) -> None:
        self.results: list[tuple[str, Result]] = []  # each with its part
        self.device: dict[str, str] = {}  # of the running part
        self._written: list[dict[str, Any]] = []
        self._bench = bench
        self._begin = time.monotonic()
        self._commit = bench.commit or _commit()

    def seconds_left(self) -> float:
        return self._bench.time_limit - (time.monotonic() - self._begin)

    def add(self, part: str, result: Result) -> None:
        print(f"{part}: {result}", flush=True)
        command = ["jaxpage", "bench", "suite", "--only", part]
        command += ["--tiny"] if self._bench.tiny else []
        self.results.append((part, result))
        self._written.append(
            {"part": part}
            | asdict(result)
            | {"command": shlex.join(command), "commit": self._commit}
            | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
            | {key: self.device.get(key) for key in ("device", "platform", "jax")}
        )
        if path := self._bench.json:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(path.name + ".part")
            draft.write_text(json.dumps({"results": self._written}, indent=1) + "\n")
            os.replace(draft, path)  # atomic: the process may be killed at any time


def _commit() -> str:
    """The commit of this checkout, marked if files differ from it; "unknown" without git."""
    options = ["--always", "--abbrev=40", "--exclude=*", "--dirty= with changes"]
    command = ["git", "-C", str(ROOT), "describe", *options]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"
