"""The arguments of programs as shapes: with a dtype, and a place on the device or the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, Sharding

from jaxpage.parallel.sharding import sharding


def platform_of(leaves: list[jax.ShapeDtypeStruct]) -> str:
    """The platform of the parameters, or else jax's default."""
    for leaf in leaves:
        if leaf.sharding is not None:
            return next(iter(leaf.sharding.device_set)).platform
    return jax.default_backend()


def parameter(variable: nnx.Variable, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    value = variable.get_raw_value()
    if mesh is None:
        return struct(value, getattr(value, "sharding", None))
    metadata = variable.get_metadata()
    return struct(value, sharding(mesh, metadata["axes"], metadata["units"]))


def one_slot(x: jax.ShapeDtypeStruct, axis: int, num_slots: int) -> jax.ShapeDtypeStruct:
    shape = list(x.shape)
    shape[axis] //= num_slots
    return jax.ShapeDtypeStruct(shape, x.dtype)


def structs(
    tree: Any, mesh: Mesh | None, axes_of: Callable[[Any], tuple[str, ...]] = lambda _: ()
) -> Any:
    """Shape, dtype and sharding of each leaf; axes without a name are replicated on every device of a mesh."""
    return jax.tree.map(
        lambda x: struct(x, None if mesh is None else sharding(mesh, axes_of(x))), tree
    )


def struct(x: Any, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
