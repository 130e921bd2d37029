"""The definition of masks and biases of logits: plain jnp, obvious, slow.

Letters: R rows, V tokens, N tokens that a row names.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32


def mask_and_add(
    logits: Float32[Array, "R V"],
    mask: UInt32[Array, "R W"],
    ids: Int32[Array, "R N"],
    values: Float32[Array, "R N"],
) -> Float32[Array, "R V"]:
    """Tokens whose bit is 0 become -inf: bit `v % 32` of word `v // 32`, W = ceil(V / 32). Then `values[r, i]` is added
    to token `ids[r, i]`; ids from V on are dropped, none is negative.
    """
    num_rows, vocab_size = logits.shape
    token = jnp.arange(vocab_size, dtype=jnp.uint32)
    allowed = (mask[:, token // 32] >> (token % 32)[None, :]) & 1 == 1
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    return jnp.where(allowed, logits, -jnp.inf).at[rows, ids].add(values, mode="drop")
