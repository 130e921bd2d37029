"""Rotary embeddings in plain XLA, for every platform. The signature is the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.rope import reference


def rotate(
    parts: Sequence[Float[Array, "... T N D"]],
    cos: Float[Array, "... T 1 half"],
    sin: Float[Array, "... T 1 half"],
    *,
    interleaved: bool = False,
) -> list[Float[Array, "... T N D"]]:
    # Halves of a head are halves of a TPU's registers, which XLA would pad, merge and copy.
    return lax.platform_dependent(
        *(list(parts), cos, sin),
        tpu=partial(by_product, interleaved=interleaved),
        default=partial(reference.rotate, interleaved=interleaved),
    )


def split_and_rotate(
    joined: Float[Array, "... T N*D"],
    cos: Float[Array, "... T 1 half"],
    sin: Float[Array, "... T 1 half"],
    *,
    heads: tuple[int, int, int],
    interleaved: bool = False,
) -> list[Float[Array, "... T N D"]]:
    *turned, values = reference.split(joined, heads)
    return [*rotate(turned, cos, sin, interleaved=interleaved), values]


def by_product(
    parts: Sequence[jax.Array], cos: jax.Array, sin: jax.Array, *, interleaved: bool = False
) -> list[jax.Array]:
    """The same; each dimension's partner comes from a product with a matrix of 0, 1 and -1, which is exact."""
    half, size, dtype = cos.shape[-1], parts[0].shape[-1], parts[0].dtype
    first = 2 * np.arange(half) if interleaved else np.arange(half)
    second = first + (1 if interleaved else half)
    partner = np.zeros((size, size), np.float32)
    partner[second, first], partner[first, second] = -1, 1
    widths = [(0, 0)] * (cos.ndim - 1) + [(0, size - 2 * half)]

    def of_all(values, of_rest):
        both = jnp.repeat(values, 2, axis=-1) if interleaved else jnp.tile(values, 2)
        return jnp.pad(both, widths, constant_values=of_rest)

    # float32 in one pass would be rounded to bfloat16.
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    cos, sin, partner = of_all(cos, 1), of_all(sin, 0), jnp.asarray(partner, dtype)
    return [x * cos + jnp.matmul(x, partner, precision=precision) * sin for x in parts]
