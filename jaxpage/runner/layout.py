"""Named fields in one flat int32 buffer: written as NumPy views on the host, read as slices on the device.

One upload a step instead of a dozen: on fast chips the host's dispatch is the bottleneck, not the bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Field:
    """`shape` and a 4-byte dtype ("int32", "uint32" or "float32") of one part of the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "int32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Fields one after another, without gaps."""

    fields: tuple[Field, ...]

    @property
    def size(self) -> int:
        return sum(field.size for field in self.fields)

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable NumPy views of int32[size] `buffer`, by name."""
        views, start = {}, 0
        for field in self.fields:
            part = buffer[start : start + field.size].view(field.dtype)
            views[field.name] = part.reshape(field.shape)
            start += field.size
        return views

    def unpack(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """The fields of int32[size] `buffer` on the device, by name."""
        arrays, start = {}, 0
        for field in self.fields:
            part = buffer[start : start + field.size].reshape(field.shape)
            arrays[field.name] = jax.lax.bitcast_convert_type(part, jnp.dtype(field.dtype))
            start += field.size
        return arrays
