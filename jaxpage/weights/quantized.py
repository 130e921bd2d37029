"""Weights that a checkpoint stores as integers or fp8 with scales: as floats, and unpacked.

One object takes the place of the tensors of a weight. It reads as float32, for layers that compute with floats, and
unpacked, for those that compute with quantised weights.

Must not know how tensors are named or laid out, nor models or devices.

Letters: F outputs, E inputs, J groups of inputs that share a scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Unpacked:
    """A weight (q - zero) * scale.

    `q`: [F, E] fp8, int8, or uint8 in 0..15. `scale`: float32[F], or [J, F]. `zero`: int16[J, F]; None: 0. `groups`:
    int32[E], the group of each input; None: adjacent inputs, the same number in each but the last.
    """

    q: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None
    groups: np.ndarray | None = None
    group_size: int = 0  # without `groups`

    def rows(self, index: slice | np.ndarray) -> Unpacked:
        """Some outputs."""
        return Unpacked(
            self.q[index],
            self.scale[..., index],
            None if self.zero is None else self.zero[:, index],
            self.groups,
            self.group_size,
        )

    def values(self) -> np.ndarray:
        """float32[F, E]"""
        q = self.q.astype(np.float32)
        if self.scale.ndim == 1:
            q *= self.scale[:, None]
            return q
        weight = q
        at: tuple[Any, ...] = (slice(None), self.groups)
        if self.groups is None and q.shape[1] == len(self.scale) * self.group_size:
            # Broadcast, which is much faster than a scale for each input.
            weight, at = q.reshape(len(q), -1, self.group_size), (..., None)
        elif self.groups is None:
            at = (slice(None), np.arange(q.shape[1]) // self.group_size)
        if self.zero is not None:
            weight -= self.zero.T[at]
        weight *= self.scale.T[at]
        return q


class QuantizedTensor:
    """A weight stored as several tensors: a `weights.stored.Stored` with one more method."""

    name: str  # LAYER.weight
    dtype = np.dtype(np.float32)
    rounds_inputs = False  # whether it was made for inputs that are rounded to int8

    @property
    def shape(self) -> tuple[int, int]:
        raise NotImplementedError

    @property
    def number(self) -> np.dtype:
        """That of `Unpacked.q`."""
        raise NotImplementedError

    @property
    def num_groups(self) -> int | None:
        """Groups of inputs with scales of their own; None: there is only a scale for each output."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ValueError if shapes or dtypes of the tensors do not fit each other."""
        raise NotImplementedError

    def unpack(self) -> Unpacked:
        """The whole weight."""
        raise NotImplementedError

    def read(self, index: Index = ()) -> np.ndarray:
        """float32, `weight[index]`."""
        start, stop, _ = (index[0] if index else slice(None)).indices(self.shape[0])
        values = unpacked(self).rows(slice(start, max(start, stop))).values()
        return values[(slice(None), *index[1:])]


@functools.lru_cache(maxsize=1)
def unpacked(tensor: QuantizedTensor) -> Unpacked:
    """`tensor.unpack()`; the last one is kept, since every device and every part of a layer reads its own share.

    `unpacked.cache_clear()` frees its memory.
    """
    return tensor.unpack()
