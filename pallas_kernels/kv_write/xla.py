"""Scatter of new keys and values into the pool, and copies of whole blocks, in plain XLA.

On a donated pool both stay in place (the compiled step's alias bytes equal the pool's bytes; tested for every bucket).
A layer's pool is one array, or a `QuantizedPool` of two, which are written and copied alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.kv_write.quantized import QuantizedPool, dequantize, quantize

Pool = Shaped[Array, "N S 2*K D"] | QuantizedPool


def write_kv(
    pool: Pool,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    slot_mapping: Int[Array, " T"],
) -> Pool:
    """The pool with token t's K and V in slot `slot_mapping[t]` (`block_id * S + offset`); K and V interleaved."""
    num_tokens, num_kv_heads, head_dim = k.shape
    kv = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)

    def write(array, new):
        slots = array.reshape(-1, *array.shape[2:])
        return slots.at[slot_mapping].set(new, mode="drop").reshape(array.shape)

    return jax.tree.map(write, pool, to_storage(kv, pool))


def copy_blocks(pool: Pool, sources: Int[Array, " C"], destinations: Int[Array, " C"]) -> Pool:
    """The pool with block `destinations[i]` a copy of block `sources[i]`. Padding: (0, 0), the null block onto itself.

    All sources are read before any destination is written.
    """
    return jax.tree.map(lambda x: put_blocks(x, destinations, x[sources]), pool)


def put_blocks(
    array: Shaped[Array, "N ..."], block_ids: Int[Array, " C"], contents: Shaped[Array, "C ..."]
) -> Shaped[Array, "N ..."]:
    """An array of the pool with those contents in its blocks; of ids that come twice the content is one of the two.

    At once, but for TPUs one by one: for a scatter of bytes they would have the whole pool in another tiling, and copy
    it there and back (1.05 GB for as large a pool on a v6e; so 0.2 MB).
    """

    def one_by_one(array, block_ids, contents):
        def put(i, array):
            return lax.dynamic_update_index_in_dim(array, contents[i], block_ids[i], 0)

        return lax.fori_loop(0, block_ids.shape[0], put, array)

    def at_once(array, block_ids, contents):
        return array.at[block_ids].set(contents, mode="drop")

    return lax.platform_dependent(array, block_ids, contents, tpu=one_by_one, default=at_once)


@overload
def to_storage(kv: jax.Array, pool: jax.Array) -> jax.Array: ...
@overload
def to_storage(kv: jax.Array, pool: QuantizedPool) -> QuantizedPool: ...
def to_storage(kv, pool):
    """`kv` [..., D] as the pool stores it: its own dtype, the bits of a 2-byte float as uint16, or quantised.

    XLA:CPU has no bf16 scatter or gather and converts the whole pool to float32 for one; integers it moves as they
    are. (A bitcast of the pool itself would copy it, so the pool is allocated as uint16.) Of a quantised pool that
    holds for fp8, whose bits are kept as uint8 everywhere, and for scales and zeros.
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
    """The inverse of `to_storage` for blocks that were read; `dtype` is that of the keys."""
    if isinstance(kv, QuantizedPool):
        scale_zero = kv.scale_zero
        if scale_zero is not None:
            scale_zero = from_storage(scale_zero, jnp.bfloat16)
        return dequantize(kv.data, scale_zero, kv.format).astype(dtype)
    if kv.dtype == jnp.uint16:
        return lax.bitcast_convert_type(kv, dtype)
    return kv
