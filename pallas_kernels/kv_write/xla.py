"""Scatter of new keys and values into the pool, in plain XLA.

A donated pool is updated in place (the compiled step's alias bytes equal the pool's bytes; tested for every bucket). A
layer's pool is one array, or a `QuantizedPool` of two, which are written in the same way.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart, whole
from pallas_kernels.kv_write.storage import Pool, to_storage
from pallas_kernels.lists import distinct


def write_kv(
    pool: Pool | PoolPart | LatentPool,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K V"],
    slot_mapping: Int[Array, " T"],
) -> Pool | PoolPart | LatentPool:
    """`reference.write_kv`; tokens without a slot or with one in the null block are written nowhere."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if isinstance(pool, LatentPool):
        kv = pool.slots_of(k)
    else:
        kv = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)
    array = whole(pool)
    num_blocks, block_size = array.shape[:2]
    slots = distinct(slot_mapping, slot_mapping < block_size, num_blocks * block_size)
    # Otherwise XLA computes the slots again in each layer, and for each value that is written.
    slots = lax.optimization_barrier(slots)

    def write(array, new):
        written, where = array.reshape(-1, *array.shape[2:]), slots
        if isinstance(pool, PoolPart):
            where = (slots, pool.places(new.shape[2] // array.shape[3]))
            new = new.reshape(num_tokens, -1, array.shape[3])
        written = written.at[where].set(
            new, mode="drop", wrap_negative_indices=False, unique_indices=True
        )
        return written.reshape(array.shape)

    array = jax.tree.map(write, array, to_storage(kv, array))
    return replace(pool, pool=array) if isinstance(pool, PoolPart | LatentPool) else array
