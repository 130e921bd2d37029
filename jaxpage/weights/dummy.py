"""Random weights from the declared initializers: for `load_format="dummy"`, and for a training run."""

from __future__ import annotations

import functools
import zlib
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, Sharding

from jaxpage.models.layers import Initialiser
from jaxpage.weights.spec import specs, variables

Model = TypeVar("Model", bound=nnx.Module)


def initialise(model: Model, *, seed: int, mesh: Mesh | None = None) -> Model:
    """Draw every parameter of `model` from its initializer, in place; returns the model.

    A parameter depends only on the seed, its path and its shape, not on the mesh. It is created on the devices, shard
    by shard.
    """
    key = jax.random.key(seed)
    targets = variables(model)
    for path, spec in specs(model).items():
        # crc32, because Python's hash of a string differs between processes.
        param_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        value = _draw(param_key, spec.init, spec.shape, spec.dtype, spec.sharding(mesh))
        targets[path].set_value(value)
    return model


def _draw(
    key: jax.Array,
    init: Initialiser,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    sharding: Sharding,
) -> jax.Array:
    return _compiled(init, shape, dtype, sharding)(key)


@functools.lru_cache(maxsize=256)
def _compiled(
    init: Initialiser, shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding
) -> jax.stages.Wrapped:
    """Cached: layers have equal shapes, so a model needs about ten of these."""
    return jax.jit(lambda key: init(key, shape, dtype), out_shardings=sharding)
