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
    if bias is not None:
        out = out + bias.astype(out.dtype)[None]
    return out.astype(dtype)
