"""Results of measurements: a value, the bar it must meet, and the reason if there is no value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

TARGET = "H200"  # the device that the suite's bars for speed are for
VERDICTS = {True: "passed", False: "FAILED", None: "no verdict"}


def publish(report: Mapping[str, Any], path: Path | None, text: str) -> None:
    """Write the report to `path` as JSON, if given, and print the text."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(text)


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """The rows in columns, the first `left` of them left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


@dataclass(frozen=True)
class Bar:
    relation: Literal["<=", ">="]
    limit: float

    def holds(self, value: float) -> bool:
        """NaN passes no bar."""
        return value <= self.limit if self.relation == "<=" else value >= self.limit

    def __str__(self) -> str:
        return f"{self.relation} {self.limit:g}"


@dataclass(frozen=True, kw_only=True)
class Context:
    """The input of a part of the suite."""

    tiny: bool  # sizes that a CPU computes in seconds
    folder: str  # for the part's files
    # Peak rates of the device, once they are measured: bytes and floating point operations per second.
    bandwidth: float | None = None
    matmul: float | None = None


@dataclass(frozen=True)
class Result:
    """One measurement. Without a value, or with a bar but no verdict, `reason` says why."""

    name: str
    value: float | None
    unit: str
    bar: str | None = None
    passed: bool | None = None
    reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def has_verdict(self) -> bool:
        return self.bar is not None or self.passed is False

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, value, bar, verdict and reason; "" for what is missing."""
        value = "" if self.value is None else f"{self.value:.4g} {self.unit}".strip()
        verdict = VERDICTS[self.passed] if self.has_verdict else ""
        return self.name, value, self.bar or "", ": ".join(filter(None, (verdict, self.reason)))

    def __str__(self) -> str:
        name, value, bar, verdict = self.cells
        return "  ".join(filter(None, (f"{name}:", value, bar and f"bar {bar}", verdict)))


def measured(
    name: str,
    value: float,
    unit: str,
    bar: Bar | None = None,
    *,
    device: str | None = None,
    **details: Any,
) -> Result:
    """A value. A `bar` gives it a verdict; if a `device` (its kind) is given, only if that is the bars' TARGET."""
    passed, reason = bar and bar.holds(value), None
    if bar is not None and device is not None and TARGET not in device:
        passed, reason = None, f"the bar is for an {TARGET}; this is {device}"
    return Result(name, value, unit, bar and str(bar), passed, reason, details)


def missing(name: str, unit: str, reason: str, bar: Bar | None = None) -> Result:
    """Something that could not be measured, because a requirement is missing."""
    return Result(name, None, unit, bar and str(bar), None, reason)


def failed(name: str, reason: str, bar: Bar | None = None) -> Result:
    """Something that should have worked here and did not."""
    return Result(name, None, "", bar and str(bar), False, reason)


def error_summary(error: BaseException) -> str:
    """The first line of an error: its type and message, without notes, which jax adds, and without a traceback.

    An error in another process is a plain RuntimeError here, whose message names the original type.
    """
    kind = "" if type(error) in (RuntimeError, TimeoutError) else f"{type(error).__name__}: "
    line = f"{kind}{error}".strip().partition("\n")[0].strip() or "no message"
    return line if len(line) <= 300 else line[:300] + " .."


def table_of_bars(results: Sequence[tuple[str, Result]]) -> str:
    """A line for each result, given with its part, that has a bar or failed."""
    shown = [(part, result.cells) for part, result in results if result.has_verdict]
    rows = [(f"{part}: {name}", *rest) for part, (name, *rest) in shown]
    header = ("", "value", "bar", "")
    return table([header, *rows], left=4) if rows else "nothing that was measured has a bar"
