"""How the TPU kernel reads pools of 8-bit floats: the MXU multiplies them with bfloat16 as they are.

Before v7 an MXU has e4m3 with a bias of the exponent of 11 instead of 7, `float8_e4m3b11fnuz`. To it the pool's bits
are a 16th of their numbers, the *unit*, which the kernel makes up for where it scales scores and results. Three
patterns of bits mean something else: that of -0 is NaN, so the kernel stores 0 instead; and those of NaN are numbers,
so it stores that of -0 for them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.quantized import FLOATS, QuantizedPool
from pallas_kernels.mosaic_tpu import generation

BIASED = "fp8_e4m3b11"  # the format of an fp8_e4m3 pool to such an MXU
UNIT_OF_BIASED = 16.0
STORED_FLOATS = FLOATS | {BIASED: jnp.float8_e4m3b11fnuz}  # what the pool's bits are to the MXU
NAN = 0x80  # -0 in e4m3


def format_of(pool: Any) -> str | None:
    """Of a pool on the TPU that is compiled for, or in the interpreter; None if it is not quantised."""
    if not isinstance(pool, QuantizedPool):
        return None
    is_biased = pool.format == "fp8_e4m3" and (generation() or 0) < 7
    return BIASED if is_biased else pool.format


def stored_bits(data: jax.Array, format: str) -> jax.Array:
    """uint8, of `quantize`, as the kernel stores it."""
    if format != BIASED:
        return data
    unsigned = jnp.where(data == NAN, jnp.uint8(0), data)
    return jnp.where(data & 0x7F == 0x7F, jnp.uint8(NAN), unsigned)
