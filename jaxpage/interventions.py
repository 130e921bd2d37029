"""What a request changes inside the model: values at named points, at some positions of its sequence.

Every intervention is affine, so the device needs only one form: value -> factor * value + vector. Knows names, shapes
and positions. Must not know models, devices or the engine.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpage.research_config import ResearchSpec
from jaxpage.token_positions import Positions, to_positions, within

# Slot fields, N entries each: see `slot_fields`.
POINT, FACTOR, VECTOR = "intervention_point", "intervention_factor", "intervention_vector"
START, STOP, STRIDE = "intervention_start", "intervention_stop", "intervention_stride"


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
    """value + vector [E] at the positions. Raises ValueError for other shapes, and for values that are not finite."""
    return Intervention(
        point=point, factor=1.0, vector=_vector(vector), positions=to_positions(positions)
    )


def replace(point: str, vector: Any, positions: Positions | slice) -> Intervention:
    """Replace the value by vector [E] at the positions. Raises ValueError like `add`."""
    return Intervention(
        point=point, factor=0.0, vector=_vector(vector), positions=to_positions(positions)
    )


def scale(point: str, factor: float, positions: Positions | slice) -> Intervention:
    """factor * value at the positions. Raises ValueError unless the factor is a finite number."""
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real) or not _is_finite(factor):
        raise ValueError(f"factor must be a finite float32, got {factor!r}")
    return Intervention(
        point=point, factor=float(factor), vector=None, positions=to_positions(positions)
    )


def to_interventions(name: str, value: Any) -> tuple[Intervention, ...]:
    """One or several interventions as a tuple. Raises ValueError for other values."""
    given = (value,) if isinstance(value, Intervention) else value
    if not isinstance(given, list | tuple) or not all(isinstance(x, Intervention) for x in given):
        raise ValueError(
            f"{name} must be a list of what jaxpage.research.add, replace or scale return, got {value!r:.200}"
        )
    return tuple(given)


def slot_fields(spec: ResearchSpec | None) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """(name, shape, dtype, fill) of each slot field; none if the engine allows no interventions."""
    if spec is None or not spec.points:
        return
    size = (spec.max_interventions,)
    yield POINT, size, "int32", -1
    yield START, size, "int32", 0
    yield STOP, size, "int32", 0
    yield STRIDE, size, "int32", 1
    yield FACTOR, size, "float32", 1
    yield VECTOR, (*size, spec.hidden_size), "float32", 0


def slot_values(
    asked: Sequence[Intervention] | None, prompt_len: int, spec: ResearchSpec | None
) -> Mapping[str, np.ndarray]:
    """The slot fields of a request; {} without interventions. Raises ValueError for those the engine does not allow."""
    if not asked:
        return {}
    if spec is None or not spec.points:
        raise ValueError("interventions need an engine with research=ResearchConfig(points=[...])")
    if len(asked) > spec.max_interventions:
        raise ValueError(
            f"{len(asked)} interventions, but ResearchConfig has max_interventions={spec.max_interventions}"
        )
    values = {name: np.full(shape, fill, dtype) for name, shape, dtype, fill in slot_fields(spec)}
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
    """The interventions at tokens `start .. end` of a sequence, as keys for the hash of their block."""
    keys = []
    for each in asked:
        where = each.positions.resolve(prompt_len)
        if here := within(where, start, end):
            place = f"{here.start - start} {here.stop - start} {here.step}"
            keys.append(f"intervention {each.digest} {place}")
    return keys


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
    return abs(number) <= float(np.finfo(np.float32).max)  # False for NaN
