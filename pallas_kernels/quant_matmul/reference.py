"""The definition of a product with a quantized weight: plain jnp, in float32, or in float64 if that is enabled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.matmul.reference import with_bias
from pallas_kernels.quant_matmul.quantized import (
    QuantizedWeight,
    padded,
    round_rows,
    unpack,
)


def dequantize(weight: QuantizedWeight) -> Float[Array, "F E"]:
    """The dequantized weight: each value is one float32 product, rounded once."""
    if weight.format == "int4":
        values = unpack(weight).astype(jnp.float32) * weight.scale.T[:, :, None]
        return values.reshape(weight.shape)
    values = weight.data.astype(jnp.float32)
    if weight.has_groups:
        return values * jnp.repeat(weight.scale.T, weight.group_size, axis=1)
    return values * weight.scale[:, None]


def quant_matmul(
    x: Float[Array, "T E"],
    weight: QuantizedWeight,
    *,
    round_x: bool = False,
    bias: Float[Array, " F"] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "T F"]:
    """x times the transposed weight, plus bias: a float32 sum, rounded to `dtype`.

    With `round_x` x is quantized to int8 first, with one scale per row: x = integers * scale, scale = max |x| / 127
    (vector-wise quantization, LLM.int8(), arXiv:2208.07339, section 3.1). It is meant for int8 weights
    with a scale per output. Raises ValueError if x does not fit the weight.
    """
    x, w = padded(x, weight).astype(jnp.float32), dequantize(weight)
    if round_x:
        integers, scale = round_rows(x)
        x = integers.astype(jnp.float32) * scale
    out = jnp.matmul(x, w.T, precision=jax.lax.Precision.HIGHEST)
    return with_bias(out, bias, dtype)
