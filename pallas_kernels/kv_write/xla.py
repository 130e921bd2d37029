"""Scatter of new keys and values into the pool, and copies of whole blocks, in plain XLA.

On a donated pool both stay in place (the compiled step's alias bytes equal the pool's bytes; tested for every bucket).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped


def write_kv(
    pool: Shaped[Array, "N S 2*K D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    slot_mapping: Int[Array, " T"],
) -> Shaped[Array, "N S 2*K D"]:
    """The pool with token t's K and V in slot `slot_mapping[t]` (`block_id * S + offset`); K and V interleaved."""
    num_tokens, num_kv_heads, head_dim = k.shape
    kv = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)
    slots = pool.reshape(-1, 2 * num_kv_heads, head_dim)
    return slots.at[slot_mapping].set(to_storage(kv, pool), mode="drop").reshape(pool.shape)


def copy_blocks(
    pool: Shaped[Array, "N S 2*K D"], sources: Int[Array, " C"], destinations: Int[Array, " C"]
) -> Shaped[Array, "N S 2*K D"]:
    """The pool with block `destinations[i]` a copy of block `sources[i]`. Padding: (0, 0), the null block onto itself.

    All sources are read before any destination is written.
    """
    return pool.at[destinations].set(pool[sources], mode="drop")


def to_storage(kv: jax.Array, pool: jax.Array) -> jax.Array:
    """`kv` as the pool stores it: its own dtype, or the bits of a 2-byte float as uint16.

    XLA:CPU has no bf16 scatter or gather and converts the whole pool to float32 for one; integers it moves as they
    are. (A bitcast of the pool itself would copy it, so the pool is allocated as uint16.)
    """
    if pool.dtype == jnp.uint16:
        return lax.bitcast_convert_type(kv, jnp.uint16)
    return kv.astype(pool.dtype)


def from_storage(kv: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `to_storage` for blocks that were read; `dtype` is that of the keys."""
    if kv.dtype == jnp.uint16:
        return lax.bitcast_convert_type(kv, dtype)
    return kv
