"""Arrays of a pool that several layers share, because layers differ in the number or in the size of their heads.

A pool has the heads of its widest layers, in pieces of the size of its smallest heads. A layer with larger heads keeps
each in several adjacent pieces. A layer that needs at most half of the pool's pieces has a part of them, and other
layers of its kind have the others. Scales and zeros of quantised heads have a place for each piece; large heads use the
first ones of their part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.quantized import QuantizedPool
from pallas_kernels.kv_write.storage import Pool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolPart:
    """The part of a layer in an array of the pool. Reads like the layer's own pool, `[N, S, 2*K, D]`."""

    pool: Pool
    num_kv_heads: int = field(metadata={"static": True})  # of the layer
    pieces: int = field(metadata={"static": True})  # of one of its heads
    index: int = field(default=0, metadata={"static": True})  # number of the part

    @property
    def shape(self) -> tuple[int, ...]:
        *blocks, _, width = self.pool.shape
        return (*blocks, 2 * self.num_kv_heads, self.pieces * width)

    def places(self, pieces: int) -> slice:
        """Which pieces of the pool are the layer's, if its heads have so many."""
        size = 2 * self.num_kv_heads * pieces
        return slice(self.index * size, (self.index + 1) * size)

    def own(self, pool: Pool) -> Pool:
        """[..., 2*K, D] of the layer from [..., 2*K, D] of the pool."""
        if not isinstance(pool, QuantizedPool):
            return self._taken(pool, self.pieces)
        scale_zero = None if pool.scale_zero is None else self._taken(pool.scale_zero, 1)
        return replace(pool, data=self._taken(pool.data, self.pieces), scale_zero=scale_zero)

    def _taken(self, array: jax.Array, pieces: int) -> jax.Array:
        own = array[..., self.places(pieces), :]
        return own.reshape(*array.shape[:-2], 2 * self.num_kv_heads, -1)


def whole(pool: Pool | PoolPart | LatentPool) -> Pool:
    """The pool itself."""
    return pool.pool if isinstance(pool, PoolPart | LatentPool) else pool
