"""The definition of a product: plain jnp, in float32, or in float64 if that is enabled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def matmul(
    x: Float[Array, "T E"],
    weight: Float[Array, "F E"],
    *,
    bias: Float[Array, " F"] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "T F"]:
    """x times the transposed weight, plus bias: a float32 sum, rounded to `dtype`."""
    wide = weight.astype(jnp.float32)
    out = jnp.matmul(x.astype(jnp.float32), wide.T, precision=jax.lax.Precision.HIGHEST)
    return with_bias(out, bias, dtype)


def with_bias(out: jax.Array, bias: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """A float32 product [..., F] plus bias [F], rounded to `dtype`."""
    if bias is not None:
        out = out + jnp.expand_dims(bias, range(out.ndim - 1)).astype(out.dtype)
    return out.astype(dtype)
