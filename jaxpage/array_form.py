"""The form of an array, which programs are compiled for: shape, dtype and the devices where it is."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Sharding


def form_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of an array; a NumPy array has no sharding."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def is_elsewhere(leaf: Any, sharding: Sharding | None) -> bool:
    """Whether programs that take an array of this sharding refuse this one. They move one that is not committed."""
    is_bound = isinstance(leaf, jax.Array) and leaf.committed
    if not is_bound or sharding is None:
        return False
    return not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def in_words(leaf: Any) -> str:
    """An array or a form as text: "bfloat16[8, 64]"."""
    return f"{leaf.dtype}{list(leaf.shape)}"
