"""Rows of texts, all of one length: the inputs of models without a KV cache.

A row may have several texts in sequence. Knows which tokens see each other. Must not know engines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# Most float32 scores in memory at once; longer rows are computed in parts.
_MAX_SCORES = 2**25


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Rows of tokens, all int32[B, L]."""

    token_ids: jax.Array
    positions: jax.Array  # in the token's own text, from 0
    segments: jax.Array  # 1, 2, ... for the texts of a row; 0: padding
    type_ids: jax.Array  # 0 or 1: which text of a pair, for models that use it


class RowAttention:
    """Attention within each text of a batch: tokens see those of their own text, all or only earlier ones.

    An `Attention`; with a window, token i sees token j iff |i - j| < window. Scores are computed in parts of at most
    128 MB.
    """

    def __init__(self, batch: TokenBatch, *, causal: bool):
        self._positions, self._segments, self._causal = batch.positions, batch.segments, causal

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """q [B, L, H, D], k [B, L, K, D] and v [B, L, K, V] -> [B, L, H, V] in q's dtype."""
        del layer
        num_rows, length, num_heads, _ = q.shape

        def part(q: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
            visible = self._visible(positions, segments, window)
            return _attend(q, k, v, visible, scale=scale, soft_cap=soft_cap, sinks=sinks)

        fitting = max(1, _MAX_SCORES // (num_rows * num_heads * length))
        if fitting >= length:
            return part(q, self._positions, self._segments)
        part_len = math.gcd(length, 1 << (fitting.bit_length() - 1))
        cut = [_cut(x, part_len) for x in (q, self._positions, self._segments)]
        parts = jax.lax.map(lambda x: part(*x), tuple(cut))
        return jnp.moveaxis(parts, 0, 1).reshape(*q.shape[:-1], -1)

    def _visible(self, positions: jax.Array, segments: jax.Array, window: int | None) -> jax.Array:
        """bool[B, Q, L]: which tokens are visible to queries with these positions and segments."""
        query, key = positions[:, :, None], self._positions[:, None, :]
        visible = segments[:, :, None] == self._segments[:, None, :]
        if self._causal:
            visible &= key <= query
        if window is not None:
            visible &= jnp.abs(query - key) < window
        return visible


def _cut(x: jax.Array, part_len: int) -> jax.Array:
    """[B, L, ...] -> [L / part_len, B, part_len, ...]"""
    parts = x.reshape(x.shape[0], -1, part_len, *x.shape[2:])
    return jnp.moveaxis(parts, 1, 0)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """q [B, Q, H, D], k [B, L, K, D], v [B, L, K, V], bool[B, Q, L] -> [B, Q, H, V]; softmax and sums in float32."""
    num_kv_heads = k.shape[2]
    groups = q.reshape(*q.shape[:2], num_kv_heads, -1, q.shape[-1])
    f32 = jnp.float32
    scores = scale * jnp.einsum("bqkgd,blkd->bkgql", groups, k, preferred_element_type=f32)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    # Every token, even padding, sees itself, so no row is empty.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(f32).min)
    if sinks is not None:
        sink = sinks.astype(f32).reshape(num_kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    out = jnp.einsum("bkgql,blkd->bqkgd", weights, v, preferred_element_type=f32)
    return out.reshape(*q.shape[:-1], -1).astype(q.dtype)
