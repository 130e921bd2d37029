"""What a measurement says: a value, the bar that it is held to, and why there is none of the two where there is none.

Knows numbers and text. Must not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

TARGET = "H200"  # whose speed the bars of the suite are about


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

    tiny: bool  # sizes that a CPU has done in seconds
    folder: str  # for files of the part's own
    # What the device can do at best, once that is measured: bytes and floating point operations per second.
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

    def __str__(self) -> str:
        value = "" if self.value is None else f"{self.value:.4g} {self.unit}".strip()
        bar = "" if self.bar is None else f"bar {self.bar}"
        reason = "" if self.reason is None else f"({self.reason})"
        verdict = "" if self.bar is None and self.passed is not False else VERDICTS[self.passed]
        return "  ".join(part for part in (self.name + ":", value, bar, verdict, reason) if part)


VERDICTS = {True: "passed", False: "FAILED", None: "no verdict"}


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
    text = None if bar is None else str(bar)
    if bar is not None and device is not None and TARGET not in device:
        reason = f"the bar is for an {TARGET}; this is {device}"
        return Result(name=name, value=value, unit=unit, bar=text, reason=reason, details=details)
    passed = None if bar is None else bar.holds(value)
    return Result(name=name, value=value, unit=unit, bar=text, passed=passed, details=details)


def missing(name: str, unit: str, reason: str, bar: Bar | None = None) -> Result:
    """What could not be measured, and why: something that it needs is not here."""
    return Result(
        name=name, value=None, unit=unit, bar=None if bar is None else str(bar), reason=reason
    )


def failed(name: str, reason: str, bar: Bar | None = None) -> Result:
    """What should have worked here and did not."""
    text = None if bar is None else str(bar)
    return Result(name=name, value=None, unit="", bar=text, passed=False, reason=reason)


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


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A line for everything that has a bar or failed: `results` as in the JSON file."""
    rows = [("", "value", "bar", "")]
    for result in results:
        if result["bar"] is None and result["passed"] is not False:
            continue
        value = "" if result["value"] is None else f"{result['value']:.4g} {result['unit']}".strip()
        verdict = VERDICTS[result["passed"]]
        if result["reason"]:
            verdict += f": {result['reason']}"
        name = f"{result['part']}: {result['name']}"
        rows.append((name, value, result["bar"] or "", verdict))
    if len(rows) == 1:
        return "nothing that was measured has a bar"
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for row in rows
    )
