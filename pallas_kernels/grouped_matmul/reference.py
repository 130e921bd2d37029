"""The definition of the grouped product: plain jnp, simple, slow, not jittable. Implementations are compared with it.

Letters: T rows (tokens, each as often as it has experts, sorted by expert), G groups (experts), E inputs, F outputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.quant_matmul import reference
from pallas_kernels.quant_matmul.quantized import QuantizedWeight


def grouped_matmul(
    x: Real[Array, "T E"],
    weights: Real[Array, "G F E"] | QuantizedWeight,
    group_sizes: Int[Array, " G"],
    *,
    row_scale: Float[Array, "T 1"] | None = None,
) -> Float[Array, "T F"]:
    """The first group_sizes[0] rows times weights[0], the next group_sizes[1] times weights[1], and so on: float32.

    With `row_scale` x is int8 and the weights are quantized to int8 by output: the sum of integers is exact, and
    multiplied first by its row's scale, then by its output's. Rows after the last group are 0, whatever x is there. A
    row's result depends only on the row and its expert.
    """
    out, first = jnp.zeros((x.shape[0], weights.shape[1]), jnp.float32), 0
    for group, size in enumerate(group_sizes.tolist()):
        rows = slice(first, first + size)
        product = _product(x[rows], weights[group], None if row_scale is None else row_scale[rows])
        out, first = out.at[rows].set(product), first + size
    return out


def _product(x, weight, row_scale):
    """Of a group."""
    if not isinstance(weight, QuantizedWeight):
        return x.astype(jnp.float32) @ weight.astype(jnp.float32).T
    if row_scale is None:
        return reference.quant_matmul(x, weight)
    sums = x.astype(jnp.int32) @ weight.data.astype(jnp.int32).T
    return sums.astype(jnp.float32) * row_scale * weight.scale[None]
