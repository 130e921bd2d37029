"""How the TPU kernel reads pools of 8-bit floats: the MXU multiplies them with bfloat16 as they are.

Before v7 an MXU has e4m3 with a bias of the exponent of 11 instead of 7, `float8_e4m3b11fnuz`. To it the pool's bits
are a 16th of their numbers, the *unit*, which the kernel makes up for where it scales scores and results. Three
patterns of bits mean something else: that of -0 is NaN, so no pool has it (`quantized.quantize`); and those of NaN are
numbers, so the kernel stores that of -0 for them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.kv_write.quantized import FLOATS, QuantizedPool
from pallas_kernels.mosaic_tpu import generation

NAN = 0x80


def unit_of(pool: Any) -> float:
    """Of a pool on the TPU that is compiled for, or in the interpreter; 1 of those that are not fp8_e4m3."""
    is_e4m3 = isinstance(pool, QuantizedPool) and pool.format == "fp8_e4m3"
    return 16.0 if is_e4m3 and (generation() or 0) < 7 else 1.0


def stored_float(format: str, unit: float) -> DTypeLike:
    """What the pool's bits are to the MXU."""
    return jnp.float8_e4m3b11fnuz if unit > 1 else FLOATS[format]


def stored_bits(data: jax.Array, unit: float) -> jax.Array:
    """uint8, of `quantize`, as the kernel stores it."""
    return data if unit == 1 else jnp.where(data & 0x7F == 0x7F, jnp.uint8(NAN), data)
