"""What a request changes inside the model: values at named points, at some positions of its sequence.

Every intervention is affine, so one form serves all on the device: value -> factor * value + vector. Knows names,
shapes and positions. Must not know models, devices or the engine.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

OPEN_END = 2**31 - 1  # the stop of positions that have no last one
# Slot fields, N entries each: see `slot_values`.
POINT, FACTOR, VECTOR = "intervention_point", "intervention_factor", "intervention_vector"
START, STOP, STRIDE = "intervention_start", "intervention_stop", "intervention_stride"


@dataclass(frozen=True, kw_only=True)
class ResearchConfig:
    """What requests may do inside the model; compiled into every step of the engine.

    `points`: names or patterns of `jaxpage.research.points`, those whose values are [T, E]. `max_interventions`: of one
    request. Raises ValueError.
    """

    points: Sequence[str]  # after construction a tuple
    max_interventions: int = 1

    def __post_init__(self) -> None:
        names = [self.points] if isinstance(self.points, str) else list(self.points)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"points must be names of points, at least one, got {self.points!r}")
        object.__setattr__(self, "points", tuple(names))
        most = self.max_interventions
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= 64:
            raise ValueError(f"max_interventions must be an int in 1..64, got {most!r}")


def to_research_config(given: Any) -> ResearchConfig | None:
    """A dict as a ResearchConfig. Raises ValueError for what is none."""
    if isinstance(given, ResearchConfig | None):
        return given
    if not isinstance(given, dict) or not {"points"} <= set(given) <= {
        "points",
        "max_interventions",
    }:
        raise ValueError(
            f"research must be a ResearchConfig, or a dict of its fields, got {given!r}"
        )
    return ResearchConfig(**given)


@dataclass(frozen=True)
class Positions:
    """Tokens of a sequence, counted from its first: every `stride`-th of `start .. stop`."""

    kind: str  # "prompt", "last_prompt", "generated" or "slice"
    start: int = 0
    stop: int = OPEN_END
    stride: int = 1

    def resolve(self, prompt_len: int) -> tuple[int, int, int]:
        """(start, stop, stride) in a sequence with a prompt of so many tokens."""
        known = {
            "prompt": (0, prompt_len, 1),
            "last_prompt": (prompt_len - 1, prompt_len, 1),
            "generated": (prompt_len, OPEN_END, 1),
        }
        return known.get(self.kind, (self.start, self.stop, self.stride))


def prompt() -> Positions:
    """All tokens of the prompt."""
    return Positions("prompt")


def last_prompt() -> Positions:
    """The last token of the prompt: the one that the first token of the answer is sampled from."""
    return Positions("last_prompt")


def generated() -> Positions:
    """All tokens of the answer, as inputs. The first of them is sampled before any: from the prompt's last token."""
    return Positions("generated")


@dataclass(frozen=True, kw_only=True, eq=False)
class Intervention:
    """Use `add`, `replace` or `scale`."""

    point: str
    factor: float
    vector: np.ndarray | None  # float32[E]; None: zeros
    positions: Positions
    digest: str = field(init=False, repr=False)  # of all but the positions

    def __post_init__(self) -> None:
        if not isinstance(self.point, str):
            raise ValueError(f"a point is a name, got {self.point!r}")
        values = b"" if self.vector is None else self.vector.tobytes()
        content = repr((self.point, self.factor)).encode() + b"\0" + values
        object.__setattr__(self, "digest", hashlib.sha256(content).hexdigest())


def add(point: str, vector: Any, positions: Positions | slice) -> Intervention:
    """value + vector [E] at the positions. Raises ValueError for other shapes, and for what is not finite."""
    return Intervention(
        point=point, factor=1.0, vector=_vector(vector), positions=_positions(positions)
    )


def replace(point: str, vector: Any, positions: Positions | slice) -> Intervention:
    """vector [E] in the place of the value. Raises ValueError as `add`."""
    return Intervention(
        point=point, factor=0.0, vector=_vector(vector), positions=_positions(positions)
    )


def scale(point: str, factor: float, positions: Positions | slice) -> Intervention:
    """factor * value. Raises ValueError for what is no finite number."""
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real) or not _is_finite(factor):
        raise ValueError(f"factor must be a finite float32, got {factor!r}")
    return Intervention(
        point=point, factor=float(factor), vector=None, positions=_positions(positions)
    )


def to_interventions(name: str, value: Any) -> tuple[Intervention, ...]:
    """One or several; raises ValueError for what is none."""
    given = (value,) if isinstance(value, Intervention) else value
    if not isinstance(given, list | tuple) or not all(isinstance(x, Intervention) for x in given):
        raise ValueError(
            f"{name} must be a list of what jaxpage.research.add, replace or scale return, got {value!r:.200}"
        )
    return tuple(given)


@dataclass(frozen=True, kw_only=True)
class InterventionSpec:
    """What steps are compiled for."""

    points: tuple[str, ...]  # names
    max_interventions: int  # N
    hidden_size: int  # E

    def fields(self) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
        """(name, shape, dtype, fill) of each slot field."""
        size = (self.max_interventions,)
        yield POINT, size, "int32", -1
        yield START, size, "int32", 0
        yield STOP, size, "int32", 0
        yield STRIDE, size, "int32", 1
        yield FACTOR, size, "float32", 1
        yield VECTOR, (*size, self.hidden_size), "float32", 0


def slot_values(
    asked: Sequence[Intervention] | None, prompt_len: int, spec: InterventionSpec | None
) -> Mapping[str, np.ndarray]:
    """The slot fields of a request, {} if it asks for nothing. Raises ValueError for what the engine cannot do."""
    if not asked:
        return {}
    if spec is None:
        raise ValueError("interventions need an engine with research=ResearchConfig(points=[...])")
    if len(asked) > spec.max_interventions:
        raise ValueError(
            f"{len(asked)} interventions, but ResearchConfig has max_interventions={spec.max_interventions}"
        )
    values = {name: np.full(shape, fill, dtype) for name, shape, dtype, fill in spec.fields()}
    for index, each in enumerate(asked):
        if each.point not in spec.points:
            raise ValueError(
                f"{each.point!r} is not among the points of ResearchConfig: {', '.join(spec.points)}"
            )
        if each.vector is not None and each.vector.shape != (spec.hidden_size,):
            raise ValueError(
                f"the vector at {each.point} must be [{spec.hidden_size}], got {list(each.vector.shape)}"
            )
        where = each.positions.resolve(prompt_len)
        values[POINT][index] = spec.points.index(each.point)
        values[START][index], values[STOP][index], values[STRIDE][index] = where
        values[FACTOR][index] = each.factor
        if each.vector is not None:
            values[VECTOR][index] = each.vector
    return values


def block_keys(asked: Sequence[Intervention], prompt_len: int, start: int, end: int) -> list[str]:
    """What is changed at the tokens `start .. end` of a sequence, for the hash of their block."""
    keys = []
    for each in asked:
        first, stop, stride = each.positions.resolve(prompt_len)
        if first < start:
            first += -(-(start - first) // stride) * stride
        if first < min(stop, end):
            where = f"{first - start} {min(stop, end) - start} {stride}"
            keys.append(f"intervention {each.digest} {where}")
    return keys


def _positions(given: Positions | slice) -> Positions:
    if isinstance(given, Positions):
        return given
    if not isinstance(given, slice):
        raise ValueError(
            f"positions must be prompt(), last_prompt(), generated() or a slice, got {given!r}"
        )
    numbers_ = [
        0 if given.start is None else given.start,
        OPEN_END if given.stop is None else given.stop,
        1 if given.step is None else given.step,
    ]
    is_int = all(isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in numbers_)
    if not is_int or min(numbers_) < 0 or max(numbers_) > OPEN_END or numbers_[2] == 0:
        raise ValueError(
            f"a slice of positions has ints of at least 0, and a step of at least 1, got {given}"
        )
    return Positions("slice", *map(int, numbers_))


def _vector(given: Any) -> np.ndarray:
    try:
        vector = np.array(given, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a vector has numbers, got {given!r:.100}") from error
    if vector.ndim != 1:
        raise ValueError(f"a vector has one axis, got {list(vector.shape)}")
    if not np.isfinite(vector).all():
        raise ValueError(
            f"a vector is finite, but {np.sum(~np.isfinite(vector))} of its numbers are not"
        )
    vector.setflags(write=False)
    return vector


def _is_finite(number: Any) -> bool:
    return math.isfinite(number) and abs(number) <= float(np.finfo(np.float32).max)
