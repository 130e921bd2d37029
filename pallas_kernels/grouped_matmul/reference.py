"""The definition of the grouped product: plain jnp, simple, slow, not jittable. Implementations are compared with it.

Letters: T rows (tokens, each as often as it has experts, sorted by expert), G groups (experts), E inputs, F outputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real


def grouped_matmul(
    x: Real[Array, "T E"],
    weights: Real[Array, "G F E"],
    group_sizes: Int[Array, " G"],
    *,
    row_scale: Float[Array, "T 1"] | None = None,
    scale: Float[Array, "G F"] | None = None,
) -> Real[Array, "T F"]:
    """The first group_sizes[0] rows times weights[0], the next group_sizes[1] times weights[1], and so on: float32.

    If x and weights are int8, both scales are given: the sum of integers is exact, and multiplied first by its row's
    scale, then by its output's. Rows after the last group are 0, whatever x is there. A row's result depends only on
    the row and its expert.
    """
    dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    out, first = jnp.zeros((x.shape[0], weights.shape[1]), jnp.float32), 0
    for group, size in enumerate(group_sizes.tolist()):
        rows = slice(first, first + size)
        product = x[rows].astype(dtype) @ weights[group].astype(dtype).T
        if row_scale is not None and scale is not None:
            product = product.astype(jnp.float32) * row_scale[rows] * scale[group][None]
        out, first = out.at[rows].set(product), first + size
    return out
