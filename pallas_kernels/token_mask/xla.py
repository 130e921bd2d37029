"""Masks and biases of logits in plain XLA, for every platform. The signature is the reference's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

CHUNK = 64  # of which N is a multiple


def mask_and_add(
    logits: Float32[Array, "R V"],
    mask: UInt32[Array, "R W"],
    ids: Int32[Array, "R N"],
    values: Float32[Array, "R N"],
) -> Float32[Array, "R V"]:
    logits = jnp.where(unpack_mask(mask, logits.shape[1]), logits, -jnp.inf)
    return _add_at(logits, ids, values)


def unpack_mask(mask: UInt32[Array, "R W"], vocab_size: int) -> Bool[Array, "R V"]:
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] == 1


def num_used(ids: Int32[Array, "R N"], vocab_size: int) -> Int32[Array, " R"]:
    """Up to which column a row names a token."""
    column = jnp.arange(ids.shape[1], dtype=jnp.int32)
    return jnp.where(ids < vocab_size, column + 1, 0).max(-1)


def _add_at(logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """In chunks up to the last column with an id: requests have few of them, and compilers take long for one scatter
    of all.
    """
    num_rows, vocab_size = logits.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    end = num_used(ids, vocab_size).max()

    def add(carry):
        start, logits = carry
        some_ids, some = (lax.dynamic_slice_in_dim(x, start, CHUNK, axis=1) for x in (ids, values))
        return start + CHUNK, logits.at[rows, some_ids].add(some, mode="drop")

    return lax.while_loop(lambda carry: carry[0] < end, add, (jnp.int32(0), logits))[1]
