"""Causal attention over whole rows, for training: the function `DenseAttention` computes, but faster.

On a CPU `DenseAttention` and its gradient take half of a training step, mostly for moving scores. Here the scores of
one row fit in the cache, and the gradient recomputes them instead of reading them back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class RowAttention:
    """An `Attention` (see `models.attention`) of rows [B, T]: token i sees tokens 0 to i."""

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, **others: Any
    ) -> jax.Array:
        """Raises ValueError for windows and soft caps."""
        del layer
        if given := {name: value for name, value in others.items() if value is not None}:
            raise ValueError(f"rows have no {', '.join(f'{n} {x}' for n, x in given.items())}")
        if jax.default_backend() == "cpu":
            return jax.lax.map(lambda row: _row(*row), (scale * q, k, v))
        return jax.vmap(_row)(scale * q, k, v)


@jax.checkpoint
def _row(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """q [T, H, D], k and v [T, K, D] -> [T, H, D]; the query heads of a KV head become one axis."""
    (length, heads, size), kv_heads = q.shape, k.shape[1]
    groups = q.reshape(length, kv_heads, -1, size).transpose(1, 2, 0, 3)
    groups = groups.reshape(kv_heads, -1, size)  # [K, G*T, D]
    k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    position = jnp.arange(length)
    visible = jnp.tile(position, heads // kv_heads)[:, None] >= position[None]
    scores = jnp.where(visible, jnp.einsum("kqd,ksd->kqs", groups, k), -jnp.inf)
    out = jnp.einsum("kqs,ksd->kqd", jax.nn.softmax(scores, axis=-1), v)
    out = out.reshape(kv_heads, -1, length, size).transpose(2, 0, 1, 3)
    return out.reshape(length, heads, size)
