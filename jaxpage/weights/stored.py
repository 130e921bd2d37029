"""Parameters as checkpoints store them: a tensor, rows of one, or experts that are assembled while they are read.

Each has a shape and a dtype, and reads a part of itself with little more memory. Knows `models.sources`;
must not know devices.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxpage.models.sources import Place, Rearranged, Source, Stacked

Index = tuple[slice, ...]
BLOCKS, SCALES = "_blocks", "_scales"
# The 16 values of 4 bits (OCP Microscaling Formats 1.0, FP4 E2M1).
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# For each byte the value in its lower bits, then that in its upper ones.
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)


class Stored(Protocol):
    """A parameter in a checkpoint."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: Index = ()) -> np.ndarray:
        """`parameter[index]`, in host memory."""
        ...


@dataclass(frozen=True)
class Rows:
    """Rows `start .. stop` of each of the equal groups of a tensor's rows."""

    tensor: Stored
    start: int
    stop: int
    groups: int = 1

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.groups * (self.stop - self.start), *self.tensor.shape[1:])

    def read(self, index: Index = ()) -> np.ndarray:
        first, last = _bounds(index, self.shape)[0]
        size, of_group = self.stop - self.start, self.tensor.shape[0] // self.groups
        parts = []
        for group in range(first // size, max(-(-last // size), first // size + 1)):
            # Of the rows of this group, those that are wanted.
            begin, end = max(first - group * size, 0), min(last - group * size, size)
            at = group * of_group + self.start
            parts.append(self.tensor.read((slice(at + begin, at + end), *index[1:])))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class Turned:
    """[O, I] of a tensor [I, O]."""

    tensor: Stored

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[::-1]

    def read(self, index: Index = ()) -> np.ndarray:
        rows, columns = (slice(*each) for each in _bounds(index, self.shape))
        return self.tensor.read((columns, rows)).T


@dataclass(frozen=True)
class Stack:
    """Entry x consists of the rows of the tensors `parts[x]`, concatenated. All entries have equal shapes."""

    parts: tuple[tuple[Stored, ...], ...]

    @property
    def name(self) -> str:
        return self.parts[0][0].name

    @property
    def dtype(self) -> np.dtype:
        # Some experts may be quantised, which are read as float32, and others not.
        return max((each.dtype for part in self.parts for each in part), key=lambda x: x.itemsize)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (len(self.parts), sum(each.shape[0] for each in first), *first[0].shape[1:])

    def read(self, index: Index = ()) -> np.ndarray:
        bounds = _bounds(index, self.shape)
        out = np.empty([last - first for first, last in bounds], self.dtype)
        (first, last), (start, stop), *rest = bounds
        others = tuple(slice(*each) for each in rest)
        for entry, tensors in zip(out, self.parts[first:last], strict=True):
            at = 0  # the first row of this tensor in the entry
            for tensor in tensors:
                rows = slice(max(start - at, 0), max(min(stop - at, tensor.shape[0]), 0))
                if rows.start < rows.stop:
                    where = at + rows.start - start
                    part = tensor.read((rows, *others))
                    entry[where : where + len(part)] = part
                at += tensor.shape[0]
        return out


@dataclass(frozen=True)
class Mxfp4:
    """[X, O, I] in blocks of 32 4-bit values along I, each with a power of 2 as its scale: blocks uint8[X, O, I/32,
    16], scales uint8[X, O, I/32], where 127 means 1. Read as bfloat16, which represents all values exactly.
    """

    blocks: Stored
    scales: Stored

    @property
    def name(self) -> str:
        return self.blocks.name

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(ml_dtypes.bfloat16)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.blocks.shape[:2], 2 * math.prod(self.blocks.shape[2:]))

    def read(self, index: Index = ()) -> np.ndarray:
        (first, last), *_ = _bounds(index, self.shape)
        out = np.empty((last - first, *self.shape[1:]), self.dtype)
        for entry, x in zip(out, range(first, last), strict=True):
            one = slice(x, x + 1)
            entry[...] = mxfp4_values(self.blocks.read((one,)), self.scales.read((one,)))[0]
        return out[(slice(None), *index[1:])]


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32[..., G * 2 B] from uint8[..., G, B] pairs of values, the lower 4 bits first, and uint8[..., G] scales."""
    with np.errstate(over="ignore"):
        powers = np.ldexp(np.float32(1), np.arange(256) - 127).astype(np.float32)
    powers[255] = np.nan  # defined by the format
    values = _PAIRS[blocks].reshape(*blocks.shape[:-1], -1) * powers[scales][..., None]
    return values.reshape(*blocks.shape[:-2], -1)


@dataclass(frozen=True)
class Reordered:
    """[X, O, ...] of an array that is stored in another order. `turns`: as [X, I, O]. `alternates`: with the first half
    of O in even entries and the second half in odd ones.
    """

    stored: Stored
    turns: bool
    alternates: bool

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        first, *rest = self.stored.shape
        return (first, *(reversed(rest) if self.turns else rest))

    def read(self, index: Index = ()) -> np.ndarray:
        first, outputs, *rest = (slice(*each) for each in _bounds(index, self.shape))
        wanted = slice(None) if self.alternates else outputs
        part = self.stored.read((first, *rest, wanted) if self.turns else (first, wanted, *rest))
        if self.turns:
            part = part.swapaxes(1, 2)
        if self.alternates:
            part = np.concatenate([part[:, 0::2], part[:, 1::2]], axis=1)[:, outputs]
        return part


def tensors_of(path: str, place: Place, names: Container[str]) -> tuple[str, ...]:
    """The tensors for the parameter `path` in a checkpoint with these `names`."""
    if isinstance(place, Stacked):
        whole = place.whole or path
        return (whole,) if whole in names else tuple(name for part in place.parts for name in part)
    if isinstance(place, Rearranged):
        packed = (place.tensor + BLOCKS, place.tensor + SCALES)
        return packed if place.turns and packed[0] in names else (place.tensor,)
    if place.stop is None and path in names:
        return (path,)
    return (place.tensor,)


def stored_parameter(
    path: str, place: Place, shape: tuple[int, ...], tensors: Mapping[str, Stored]
) -> Stored:
    """The parameter of that shape as stored in the checkpoint. Raises ValueError if a tensor has another shape."""
    names = tensors_of(path, place, tensors)
    found = [tensors[name] for name in names]
    first = found[0]
    if isinstance(place, Source) and place.stop is not None:
        rows = Rows(first, place.start, place.stop, place.groups)
        _check_shape(first, rows.shape, shape, path, shape)
        return rows
    is_whole = isinstance(place, Stacked) and names == (place.whole or path,)
    if isinstance(place, Stacked) and is_whole and place.turns and first.shape != shape:
        return _reordered(first, Rearranged(path, alternates=False, turns=True), shape, path)
    if isinstance(place, Source) or is_whole:
        _check_shape(first, first.shape, shape, path, shape)
        return first
    if isinstance(place, Stacked):
        rest = shape[2:]
        for tensor in found:
            _check_shape(
                tensor, tensor.shape, (shape[1] // len(place.parts[0]), *rest), path, shape
            )
        return Stack(tuple(tuple(tensors[name] for name in part) for part in place.parts))
    if len(found) == 2:
        blocks, scales = found
        packed = (*shape[:2], shape[2] // 32)
        _check_shape(blocks, blocks.shape, (*packed, 16), path, shape)
        _check_shape(scales, scales.shape, packed, path, shape)
        _check_shape(blocks, (*shape[:2], packed[2] * 32), shape, path, shape)
        return Reordered(Mxfp4(blocks, scales), turns=False, alternates=place.alternates)
    return _reordered(first, place, shape, path)


def _reordered(tensor: Stored, place: Rearranged, shape: tuple[int, ...], path: str) -> Reordered:
    reordered = Reordered(tensor, turns=place.turns, alternates=place.alternates)
    _check_shape(tensor, reordered.shape, shape, path, shape)
    return reordered


def _check_shape(
    tensor: Stored,
    found: tuple[int, ...],
    wanted: tuple[int, ...],
    path: str,
    shape: tuple[int, ...],
) -> None:
    if found != wanted:
        of_parts = "" if wanted == shape else f", so {list(wanted)} of this tensor"
        raise ValueError(
            f"{tensor.name} has shape {list(tensor.shape)} in the checkpoint; {path} of the "
            f"model wants {list(shape)}{of_parts}: check that config.json belongs to the weights"
        )


def _bounds(index: Index, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(start, stop) of each axis; axes without an index are complete."""
    whole = (*index, *[slice(None)] * (len(shape) - len(index)))
    bounds = (part.indices(size)[:2] for part, size in zip(whole, shape, strict=True))
    return [(first, max(first, last)) for first, last in bounds]
