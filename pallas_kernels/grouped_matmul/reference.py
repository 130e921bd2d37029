"""The definition of the grouped product: plain jnp, obvious, slow, not jittable. Everything else is compared with it.

Letters: T rows (tokens, each as often as it has experts, sorted by expert), G groups (experts), E inputs, F outputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul(
    x: Float[Array, "T E"], weights: Float[Array, "G F E"], group_sizes: Int[Array, " G"]
) -> Float[Array, "T F"]:
    """float32: the first group_sizes[0] rows times weights[0], the next group_sizes[1] times weights[1], and so on.

    Rows behind the last group are 0, whatever x holds there. A row's result depends on the row and its expert alone.
    """
    out, first = jnp.zeros((x.shape[0], weights.shape[1]), jnp.float32), 0
    for group, size in enumerate(group_sizes.tolist()):
        rows = slice(first, first + size)
        product = x[rows].astype(jnp.float32) @ weights[group].astype(jnp.float32).T
        out, first = out.at[rows].set(product), first + size
    return out
