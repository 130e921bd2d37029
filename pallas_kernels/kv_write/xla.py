"""Scatter of new keys and values into the pool, in plain XLA.

A donated pool is updated in place (the compiled step's alias bytes equal the pool's bytes; tested for every bucket). A
layer's pool is one array, or a `QuantizedPool` of two, which are written in the same way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.storage import Pool, to_storage


def write_kv(
    pool: Pool,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    slot_mapping: Int[Array, " T"],
) -> Pool:
    """`reference.write_kv`."""
    num_tokens, num_kv_heads, head_dim = k.shape
    kv = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)

    def write(array, new):
        slots = array.reshape(-1, *array.shape[2:])
        # A slot of -1 means none, not the pool's last one.
        written = slots.at[slot_mapping].set(new, mode="drop", wrap_negative_indices=False)
        return written.reshape(array.shape)

    return jax.tree.map(write, pool, to_storage(kv, pool))
