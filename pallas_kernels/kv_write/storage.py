"""How a pool stores keys and values: in its own dtype, as the bits of 2-byte floats, or quantized."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from pallas_kernels.kv_write.quantized import QuantizedPool, dequantize, quantize

Pool = Shaped[Array, "N S 2*K D"] | QuantizedPool  # of one layer; letters as in `reference.py`


@overload
def to_storage(kv: jax.Array, pool: jax.Array) -> jax.Array: ...
@overload
def to_storage(kv: jax.Array, pool: QuantizedPool) -> QuantizedPool: ...
def to_storage(kv, pool):
    """`kv` [..., D] as the pool stores it: its own dtype, the bits of a 2-byte float as uint16, or quantized.

    XLA:CPU has no bf16 scatter or gather and would convert the whole pool to float32; it moves integers unchanged. (A
    bitcast of the pool itself would copy it, so the pool is allocated as uint16.) In a quantized pool the same holds
    for fp8, whose bits are stored as uint8 everywhere, and for scales and zeros.
    """
    if isinstance(pool, QuantizedPool):
        if pool.scale_zero is None:
            return replace(pool, data=quantize(kv, pool.format, None)[0])
        stored = pool.scale_zero.dtype
        dtype = jnp.bfloat16 if stored == jnp.uint16 else stored
        data, scale_zero = quantize(kv, pool.format, dtype)
        assert scale_zero is not None
        return replace(pool, data=data, scale_zero=to_storage(scale_zero, pool.scale_zero))
    if pool.dtype == jnp.uint16:
        return lax.bitcast_convert_type(kv, jnp.uint16)
    return kv.astype(pool.dtype)


def from_storage(kv: Pool, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `to_storage` for blocks that were read; `dtype`: that of the keys."""
    if isinstance(kv, QuantizedPool):
        scale_zero = kv.scale_zero
        if scale_zero is not None:
            scale_zero = from_storage(scale_zero, jnp.bfloat16)
        return dequantize(kv.data, scale_zero, kv.format).astype(dtype)
    if kv.dtype == jnp.uint16:
        return lax.bitcast_convert_type(kv, dtype)
    return kv
