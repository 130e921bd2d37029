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
    not_for_rounded_rows,
    padded,
    round_rows,
    unpack,
)
from pallas_kernels.quant_matmul.reference import dequantize

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

    int8 and fp8 are exact in bfloat16, and their scale multiplies sums, of outputs or of groups; an int4 weight is
    rounded after scaling, and so is one with groups where there are many tokens.
    """
    product = _int8_product if round_x else _weight_only
    return with_bias(product(x, weight), bias, dtype)


def _weight_only(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    x = padded(x, weight)
    if weight.format == "int4":
        w = unpack(weight).astype(jnp.float32) * weight.scale.T[:, :, None]
        w = w.astype(x.dtype).reshape(weight.shape)
        return lax.dot_general(x, w, _LAST, preferred_element_type=jnp.float32)
    if weight.has_groups:
        return _sum_of_groups(x, weight)
    w = weight.data.astype(x.dtype)
    return lax.dot_general(x, w, _LAST, preferred_element_type=jnp.float32) * weight.scale[None]


def _sum_of_groups(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """int8 and fp8 with groups. The compilers write either the sums of all groups to memory, float32[J, T, F], or the
    scaled weight in x's dtype: whichever is smaller, if that is bfloat16.
    """
    num_tokens, num_out = x.shape[0], weight.shape[0]
    if 2 * num_tokens > weight.group_size:
        w = dequantize(weight).astype(x.dtype)
        return lax.dot_general(x, w, _LAST, preferred_element_type=jnp.float32)
    x = x.reshape(num_tokens, -1, weight.group_size)
    w = weight.data.reshape(num_out, -1, weight.group_size).astype(x.dtype)
    by_group = (((2,), (2,)), ((1,), (1,)))
    sums = lax.dot_general(x, w, by_group, preferred_element_type=jnp.float32)
    return (sums * weight.scale[:, None]).sum(axis=0)


def _int8_product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Both operands are integers and their sum is exact (vector-wise, LLM.int8(), arXiv:2208.07339, section 3.1)."""
    if reason := not_for_rounded_rows(weight):
        raise ValueError(reason)
    integers, row_scale = round_rows(padded(x, weight))
    total = lax.dot_general(integers, weight.data, _LAST, preferred_element_type=jnp.int32)
    return total.astype(jnp.float32) * row_scale * weight.scale[None]
