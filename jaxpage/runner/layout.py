"""Named fields in one flat int32 buffer: written through NumPy views on the host, read as slices on the device.

This makes one upload per step instead of a dozen: on fast chips the bottleneck is the host's dispatch, not the bytes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Field:
    """One part of the buffer: its shape, a 4-byte dtype ("int32", "uint32" or "float32") and the value of padding."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "int32"
    fill: int | float = 0

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Fields one after another, without gaps."""

    fields: tuple[Field, ...]

    @cached_property
    def size(self) -> int:
        return sum(field.size for field in self.fields)

    def new_buffer(self) -> np.ndarray:
        """int32[size] with every field's fill value. A new array each time: the device may still read the last one."""
        return self._filled.copy()

    @cached_property
    def _filled(self) -> np.ndarray:
        buffer = np.zeros(self.size, np.int32)
        for field, view in zip(self.fields, self.views(buffer).values(), strict=True):
            view[...] = field.fill
        return buffer

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable NumPy views of int32[size] `buffer`, by name."""
        return {field.name: self.view(buffer, field.name) for field in self.fields}

    def view(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """A writable NumPy view of one field of int32[size] `buffer`."""
        field, start = self._places[name]
        return buffer[start : start + field.size].view(field.dtype).reshape(field.shape)

    @cached_property
    def _places(self) -> dict[str, tuple[Field, int]]:
        """Each field and where it starts."""
        starts = itertools.accumulate((field.size for field in self.fields), initial=0)
        return {f.name: (f, start) for f, start in zip(self.fields, starts, strict=False)}

    def unpack(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """The fields of int32[size] `buffer` on the device, by name."""
        arrays = {}
        for name, (field, start) in self._places.items():
            part = buffer[start : start + field.size].reshape(field.shape)
            arrays[name] = jax.lax.bitcast_convert_type(part, jnp.dtype(field.dtype))
        return arrays
