"""Named slots and pools for writes of new keys and values, edge cases, for tests and bench."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write.quantized import FORMATS, LEVELS, QuantizedPool

NUM_BLOCKS, BLOCK_SIZE = 7, 4


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slot of each token in a pool of 7 blocks of 4 slots; block 0 is the null block."""

    name: str
    slots: tuple[int, ...]


_BEYOND = NUM_BLOCKS * BLOCK_SIZE
SLOTS = (
    Slots(name="one", slots=(13,)),
    Slots(name="out-of-order", slots=(22, 7, 20, 5, 6)),
    Slots(name="across-blocks", slots=(10, 11, 12, 13, 14, 15, 16)),
    Slots(name="ends-of-blocks", slots=(11, 4, 7, 8)),
    Slots(name="ends-of-the-pool", slots=(_BEYOND - 1, 4)),
    Slots(name="padding-to-the-null-block", slots=(9, 0, 21, 0, 0)),
    Slots(name="below-and-beyond-is-dropped", slots=(-1, 9, _BEYOND, 21, -5, -_BEYOND, 10**6)),
    Slots(name="nothing-but-padding", slots=(-1, 0, _BEYOND)),
    Slots(name="every-slot", slots=tuple(reversed(range(_BEYOND)))),
)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """`stored`: the dtype of an unquantized pool, or of scales and zeros; uint16 has the bits of bfloat16."""

    name: str
    stored: str
    format: str | None = None
    num_kv_heads: int = 3
    head_dim: int = 10

    @property
    def dtype(self) -> str:
        """The dtype of keys and values."""
        return "bfloat16" if self.stored == "uint16" else self.stored


POOLS = (
    *(
        Pool(name=f"{format or 'plain'}-{stored}", stored=stored, format=format)
        for format in (None, *FORMATS)
        for stored in ("float32", "bfloat16", "uint16")
    ),
    # One head, with a head dim that is unpacked four bytes at a time.
    Pool(name="mqa-int4", stored="bfloat16", format="int4", num_kv_heads=1, head_dim=64),
)


def arguments(
    pool: Pool, slots: Slots, *, seed: int = 0
) -> tuple[jax.Array | QuantizedPool, jax.Array, jax.Array, jax.Array]:
    """A pool of random bits, including NaN and infinity, then keys, values and slots, for `write_kv`."""
    rng = np.random.default_rng(seed)

    def bits(dtype, width):
        dtype = jnp.dtype(dtype)
        shape = (NUM_BLOCKS, BLOCK_SIZE, 2 * pool.num_kv_heads, width * dtype.itemsize)
        return jnp.asarray(rng.integers(0, 256, shape, np.uint8).view(dtype))

    if pool.format is None:
        array = bits(pool.stored, pool.head_dim)
    else:
        array = QuantizedPool(
            data=bits("uint8", pool.head_dim // 2 if pool.format == "int4" else pool.head_dim),
            scale_zero=bits(pool.stored, 2) if pool.format in LEVELS else None,
            format=pool.format,
        )
    shape = (len(slots.slots), pool.num_kv_heads, pool.head_dim)
    k, v = (jnp.asarray(rng.standard_normal(shape), pool.dtype) for _ in "kv")
    return array, k, v, jnp.asarray(slots.slots, jnp.int32)
