"""A product with a quantized weight in plain XLA: for every platform, format and size, sharded by XLA.

Whether a row's result depends on the number of rows is up to XLA: its products use other algorithms for one row than
for many. Only `round_x` is exact, since integers are summed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.matmul.reference import with_bias
from pallas_kernels.quant_matmul.quantized import (
    QuantizedWeight,
    padded,
    round_rows,
    unpack,
)

_LAST = (((1,), (1,)), ((), ()))


def quant_matmul(
    x: Float[Array, "T E"],
    weight: QuantizedWeight,
    *,
    round_x: bool = False,
    bias: Float[Array, " F"] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "T F"]:
    """Same contract as `reference.quant_matmul`. Weights are converted to x's dtype, sums are float32.

    int8 and fp8 are exact in bfloat16, and their scale is applied last; an int4 weight is rounded after scaling.
    """
    product = _int8_product if round_x else _weight_only
    return with_bias(product(x, weight), bias, dtype)


def _weight_only(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    x = padded(x, weight)
    if weight.format == "int4":
        w = unpack(weight).astype(jnp.float32) * weight.scale.T[:, :, None]
        w = w.astype(x.dtype).reshape(weight.shape)
        return lax.dot_general(x, w, _LAST, preferred_element_type=jnp.float32)
    w = weight.data.astype(x.dtype)
    return lax.dot_general(x, w, _LAST, preferred_element_type=jnp.float32) * weight.scale[None]


def _int8_product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Both operands are integers and their sum is exact (vector-wise, LLM.int8(), arXiv:2208.07339, section 3.1)."""
    if weight.format != "int8":
        raise ValueError(f"x is rounded for int8 weights, and this one is {weight.format}")
    integers, row_scale = round_rows(padded(x, weight))
    total = lax.dot_general(integers, weight.data, _LAST, preferred_element_type=jnp.int32)
    return total.astype(jnp.float32) * row_scale * weight.scale[None]
