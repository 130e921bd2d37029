"""The definition of writes into the pool: plain jnp, simple, slow. All implementations are compared with it.

Letters: T tokens, N blocks, S block size, K KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart
from pallas_kernels.kv_write.quantized import QuantizedPool, quantize
from pallas_kernels.kv_write.storage import Pool


def write_kv(
    pool: Pool | PoolPart | LatentPool,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K V"],
    slot_mapping: Int[Array, " T"],
) -> Pool | PoolPart | LatentPool:
    """The pool with token t's keys and values in slot `slot_mapping[t]`: slot `s % S` of block `s // S`.

    KV head h has its key at `2h` and its value at `2h + 1`. The pool determines the storage: its own dtype, the bits of
    2-byte floats (uint16), or quantized (`quantized.quantize`). If a slot is negative or outside the pool, its token is
    dropped. Slots are distinct, except in block 0, the null block, whose contents are undefined afterwards. Of a
    `PoolPart` nothing else is written. A `LatentPool` has keys alone. V is D, except that of a `LatentPool`.
    """
    if isinstance(pool, LatentPool):
        slots, keys = pool.pool, pool.slots_of(k)
        if isinstance(slots, QuantizedPool):
            data, _ = quantize(keys, slots.format, None)
            return replace(pool, pool=replace(slots, data=_put(slots.data, data, slot_mapping)))
        return replace(pool, pool=_put(slots, _as(keys, slots.dtype), slot_mapping))
    if isinstance(pool, PoolPart):
        written = write_kv(pool.own(pool.pool), k, v, slot_mapping)
        return replace(pool, pool=_with_part(pool, written))
    kv = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2])  # [T, 2*K, D]
    if not isinstance(pool, QuantizedPool):
        return _put(pool, _as(kv, pool.dtype), slot_mapping)
    if pool.scale_zero is None:
        data, _ = quantize(kv, pool.format, None)
        return replace(pool, data=_put(pool.data, data, slot_mapping))
    stored = pool.scale_zero.dtype
    data, scale_zero = quantize(kv, pool.format, jnp.bfloat16 if stored == jnp.uint16 else stored)
    assert scale_zero is not None
    return replace(
        pool,
        data=_put(pool.data, data, slot_mapping),
        scale_zero=_put(pool.scale_zero, _as(scale_zero, stored), slot_mapping),
    )


def _with_part(part: PoolPart, written: Any) -> Any:
    """The pool with the layer's part replaced by `written`, [N, S, 2*K, D] of the layer."""

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        places = part.places(new.shape[3] // array.shape[3])
        return array.at[:, :, places].set(new.reshape(*new.shape[:2], -1, array.shape[3]))

    return jax.tree.map(put, part.pool, written)


def _as(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if dtype == jnp.uint16 else x.astype(dtype)


def _put(
    array: Shaped[Array, "N S ..."], new: Shaped[Array, "T ..."], slots: Int[Array, " T"]
) -> jax.Array:
    block_size = array.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < array.shape[0] * block_size:
            array = array.at[slot // block_size, slot % block_size].set(new[token])
    return array
