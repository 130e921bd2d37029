"""Shapes that stand for arrays on the devices of the mesh that is set."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def spec(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
    """`axes`: the mesh's, along which the array is shared."""
    place = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
