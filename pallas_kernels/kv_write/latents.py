"""Arrays of a pool that store keys alone: a value is the first elements of its key (multi-head latent attention).

DeepSeek-V2, arXiv:2405.04434, section 2.1: a key is a token's latent and, after it, the rotated key that all heads
share; the latent is the value. In 8-bit floats, which have no scale, both are rounded alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.kv_write.quantized import QuantizedPool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentPool:
    """A layer's array, with the key of one KV head in each slot, and zeros up to W behind its D elements."""

    pool: Shaped[Array, "N S W"] | QuantizedPool  # of a format without scales
    value_dim: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a pool `[N, S, 2*K, D]` with one KV head."""
        *blocks, width = self.pool.shape
        return (*blocks, 2, width)

    def slots_of(self, k: Float[Array, "T 1 D"]) -> Float[Array, "T W"]:
        """The contents of slots with these keys."""
        return jnp.pad(k[:, 0], ((0, 0), (0, self.pool.shape[2] - k.shape[2])))
