"""Arrays of a pool that store keys alone: a value is the first elements of its key (multi-head latent attention).

DeepSeek-V2, arXiv:2405.04434, section 2.1: a key is a token's latent and, after it, the rotated key that all heads
share; the latent is the value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Shaped


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentPool:
    """A layer's array of keys. Has the shape of a pool with as many KV heads, `[N, S, 2*K, D]`."""

    pool: Shaped[Array, "N S K D"]
    value_dim: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *blocks, num_kv_heads, head_dim = self.pool.shape
        return (*blocks, 2 * num_kv_heads, head_dim)
