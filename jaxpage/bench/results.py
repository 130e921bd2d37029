"""What a measurement says: a value, the bar that it is held to, and why there is none where there is none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

TARGET = "H200"  # whose speed the bars of the suite are about
VERDICTS = {True: "passed", False: "FAILED", None: "no verdict"}


def publish(report: Mapping[str, Any], path: Path | None, text: str) -> None:
    """Write the report to `path` as JSON if there is one, and print the text."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(text)


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """The rows in aligned columns, the first `left` of them to the left, the others to the right."""
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
    """What a part of the suite is told. All of it goes through a pipe as JSON."""

    tiny: bool  # sizes that a CPU computes in seconds
    folder: str  # for files of the part's own
    # Peak rates of the device, once they are measured: bytes and floating point operations per second.
    bandwidth: float | None = None
    matmul: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measurement. Without a value, or with a bar but no verdict, `reason` says why."""

    name: str
    value: float | None
    unit: str
    bar: str | None = None
    passed: bool | None = None
    reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, value, bar, verdict and reason, each "" if there is none."""
        value = "" if self.value is None else f"{self.value:.4g} {self.unit}".strip()
        judged = self.bar is not None or self.passed is False
        verdict = ": ".join(filter(None, (judged and VERDICTS[self.passed], self.reason)))
        return self.name, value, self.bar or "", verdict

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
    """With a `bar`, a verdict; with a `device` (its kind) only if that is the bars' TARGET."""
    passed, reason = None if bar is None else bar.holds(value), None
    if bar is not None and device is not None and TARGET not in device:
        passed, reason = None, f"the bar is for an {TARGET}; this is {device}"
    return Result(
        name=name,
        value=value,
        unit=unit,
        bar=bar and str(bar),
        passed=passed,
        reason=reason,
        details=details,
    )


def missing(name: str, unit: str, reason: str, bar: Bar | None = None) -> Result:
    """What could not be measured, and why: something that it needs is not here."""
    return Result(name=name, value=None, unit=unit, bar=bar and str(bar), reason=reason)


def failed(name: str, reason: str, bar: Bar | None = None) -> Result:
    """What should have worked here and did not."""
    bar_text = bar and str(bar)
    return Result(name=name, value=None, unit="", bar=bar_text, passed=False, reason=reason)


def last_line(error: BaseException | str) -> str:
    """What an error says, in one line: the first of its own, or of a printed traceback's that follows the last frame.

    (Notes of an exception come after it: jax adds one that says nothing of the error.)
    """
    if isinstance(error, str):
        lines = error.strip().splitlines()
        frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
        said = [line for line in lines[frames[-1] :] if line[:1].strip()] if frames else lines[-1:]
    else:
        said = f"{type(error).__name__}: {error}".strip().splitlines()
    line = next((line.strip() for line in said if line.strip()), "no message")
    return line if len(line) <= 300 else line[:300] + " .."


def table_of_bars(results: Sequence[tuple[str, Result]]) -> str:
    """A line for each result, given with its part, that has a bar or failed."""
    rows = [("", "value", "bar", "")]
    for part, result in results:
        if result.bar is not None or result.passed is False:
            name, *rest = result.cells
            rows.append((f"{part}: {name}", *rest))
    return table(rows, left=4) if len(rows) > 1 else "nothing that was measured has a bar"
