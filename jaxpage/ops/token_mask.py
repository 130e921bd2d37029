"""Masks and biases of logits for a step: the kernel of a TPU where it can serve, else XLA. Knows no sampling parameter.

It is chosen when a program is lowered, by the platform that it is for: what calls it knows of none.
"""

from __future__ import annotations

import jax
from jax import lax

from pallas_kernels.token_mask import tpu, xla


def mask_and_add(
    logits: jax.Array, mask: jax.Array, ids: jax.Array, values: jax.Array
) -> jax.Array:
    """float32[R, V], see `pallas_kernels/token_mask/reference.py`."""
    args = (logits, mask, ids, values)
    if tpu.unsupported_reason(logits):
        return xla.mask_and_add(*args)
    return lax.platform_dependent(*args, tpu=tpu.mask_and_add, default=xla.mask_and_add)
