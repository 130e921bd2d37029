"""Values inside the model that a request returns: at named points, at some positions of its sequence.

Knows names, positions and values. Must not know models, devices or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from jaxpage.research_config import ResearchSpec
from jaxpage.token_positions import OPEN_END, Positions, Where, to_positions, within


@dataclass(frozen=True)
class Capture:
    """Use `capture`."""

    pattern: str
    positions: Positions


def capture(name: str, positions: Positions | slice = slice(None)) -> Capture:
    """Capture the values at a point, or at all points that match a pattern; see `CompletionOutput.captures`.

    Tokens of an answer have values as inputs, so its last token has none. Captured values include interventions at the
    same point. Raises ValueError.
    """
    if not isinstance(name, str):
        raise ValueError(f"what is captured is the name of a point, or a pattern, got {name!r}")
    return Capture(name, to_positions(positions))


def to_captures(name: str, value: Any) -> tuple[Capture, ...]:
    """One or several captures, or names of points for all positions. Raises ValueError for other values."""
    given = (value,) if isinstance(value, Capture | str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(x, Capture | str) for x in given):
        raise ValueError(
            f"{name} must be a list of what jaxpage.research.capture returns, or of names, got {value!r:.200}"
        )
    return tuple(capture(each) if isinstance(each, str) else each for each in given)


class Captured(NamedTuple):
    """The values at one point."""

    positions: np.ndarray  # int32[n], ascending, counted from the first token of the prompt
    values: np.ndarray  # float32[n, E]


@dataclass(frozen=True)
class WantedCaptures:
    """The captures of a request: (index of the point among those of the engine, positions), sorted by point."""

    points: tuple[str, ...]  # all that the engine captures
    wanted: tuple[tuple[int, Where], ...]
    hidden_size: int  # E

    def within(self, start: int, end: int) -> list[int]:
        """The positions in `start .. end` at which any point is captured, ascending."""
        found: set[int] = set()
        for where in {where for _, where in self.wanted}:
            found.update(within(where, start, end))
        return sorted(found)

    def wants_from(self, start: int) -> bool:
        """Whether anything is captured at position `start` or later."""
        return any(within(where, start, OPEN_END) for _, where in self.wanted)

    def by_point(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Mapping[str, Captured]:
        """Captured values by point. `parts`: (positions int32[n], values float32[n, J, E] at J captured points), in the
        order of positions. A point at which nothing was captured has arrays without rows.
        """
        nothing = (
            np.zeros(0, np.int32),
            np.zeros((0, len(self.points), self.hidden_size), np.float32),
        )
        positions, values = (np.concatenate(arrays) for arrays in zip(nothing, *parts, strict=True))
        found = {}
        for index in dict.fromkeys(index for index, _ in self.wanted):
            here = np.zeros(len(positions), bool)
            for other, (start, stop, stride) in self.wanted:
                inside = (positions >= start) & (positions < stop)
                here |= inside & ((positions - start) % stride == 0) & (other == index)
            found[self.points[index]] = Captured(positions[here], values[here, index])
        return found


def wanted_captures(
    asked: Any, prompt_len: int, spec: ResearchSpec | None
) -> WantedCaptures | None:
    """The captures of a request, from `SamplingParams.capture`; None if there are none.

    Raises ValueError for points that the engine does not capture.
    """
    if not asked:
        return None
    if spec is None or not spec.captures:
        raise ValueError("capture needs an engine with research=ResearchConfig(captures=[...])")
    wanted: set[tuple[int, Where]] = set()
    for each in to_captures("capture", asked):
        found = [i for i, name in enumerate(spec.captures) if fnmatchcase(name, each.pattern)]
        if not found:
            raise ValueError(
                f"{each.pattern!r} is not among the captures of ResearchConfig: {', '.join(spec.captures)}"
            )
        wanted.update((index, each.positions.resolve(prompt_len)) for index in found)
    return WantedCaptures(spec.captures, tuple(sorted(wanted)), spec.hidden_size)
