"""The form of an array, which programs are compiled for: shape, dtype and the devices where it is."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Sharding


def form_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """The form of an array of jax or NumPy. One of NumPy has no place."""
    place = leaf.sharding if isinstance(leaf, jax.Array) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def is_elsewhere(leaf: Any, place: Sharding | None) -> bool:
    """Whether programs that take an array at `place` refuse this one. They move one that is not committed."""
    is_bound = isinstance(leaf, jax.Array) and leaf.committed
    return is_bound and place is not None and not leaf.sharding.is_equivalent_to(place, leaf.ndim)


def in_words(leaf: Any) -> str:
    """The form of an array, or a form, as text: "bfloat16[8, 64]"."""
    return f"{leaf.dtype}{list(leaf.shape)}"
