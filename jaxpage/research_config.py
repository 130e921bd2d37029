"""What requests may capture and change inside the model: an option of the engine, compiled into its programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ResearchConfig:
    """What requests may do inside the model; compiled into every program of the engine.

    `points`: where they may intervene; `captures`: what they may capture. Both are names or patterns of
    `jaxpage.research.points` whose values are [T, E]. `max_interventions`: per request. Each step computes all captures
    of all its tokens, [T, len(captures), E] in the model's dtype, and transfers the requested ones to the host. Raises
    ValueError.
    """

    points: Sequence[str] = ()  # after construction a tuple, like `captures`
    captures: Sequence[str] = ()
    max_interventions: int = 1

    def __post_init__(self) -> None:
        for name in ("points", "captures"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if not self.points and not self.captures:
            raise ValueError("ResearchConfig needs points or captures, at least one name")
        most = self.max_interventions
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= 64:
            raise ValueError(f"max_interventions must be an int in 1..64, got {most!r}")


def _names(field: str, given: Any) -> tuple[str, ...]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{field} must be names of points, got {given!r}")
    return tuple(names)


def to_research_config(given: Any) -> ResearchConfig | None:
    """A ResearchConfig, from itself or a dict of its fields. Raises ValueError for other values."""
    if isinstance(given, ResearchConfig | None):
        return given
    fields = {"points", "captures", "max_interventions"}
    if not isinstance(given, dict) or not set(given) <= fields:
        raise ValueError(
            f"research must be a ResearchConfig, or a dict of its fields, got {given!r}"
        )
    return ResearchConfig(**given)


@dataclass(frozen=True, kw_only=True)
class ResearchSpec:
    """What programs are compiled for. Points are names."""

    points: tuple[str, ...]  # where requests may intervene
    captures: tuple[str, ...]  # what they may capture: P points
    max_interventions: int  # N
    hidden_size: int  # E
