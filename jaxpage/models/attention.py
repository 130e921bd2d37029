"""The attention that models are given, and its plainest implementation.

The paged step hands a model an attention that reads the KV pool; trainers and tests hand it `DenseAttention`. Must not
know blocks, pools or batches.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp


class Attention(Protocol):
    """Causal self-attention of one layer: q [..., T, H, D], k [..., T, K, D], v [..., T, K, V], rotated, in one dtype.
    V is D, except in models with a `ModelConfig.latent`, whose values are the first V elements of the keys.

    Query head h reads KV head `h // (H/K)`. Scores are `scale * q.k`, then `soft_cap * tanh(scores / soft_cap)` if
    there is a cap. Key j is visible to query i iff j <= i and, with a window, j > i - window (transformers'
    convention). `sinks` [H] are one more score for each head, which takes its share of the softmax and has no value;
    models without sinks do not name the argument. `layer` is the one that k and v are of: a later layer that reads them
    again passes both once more. Returns [..., T, H, V] in q's dtype.
    """

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
    ) -> jax.Array: ...


class DenseAttention:
    """Attention over the given tokens themselves, in float32, with all T*T scores in memory. Differentiable."""

    def __init__(
        self,
        positions: jax.Array,
        pictures: jax.Array | None = None,
        *,
        causal_without_window: bool = False,
    ):
        # int32[..., T], ascending: a token sees those of lower or equal position.
        self.positions = positions
        # int32[..., T]: which picture a token is of, -1 if none. Tokens of one picture see each other (Gemma 3).
        self.pictures = pictures
        # If so, only in layers with a window (Gemma 4).
        self.causal_without_window = causal_without_window

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
        del layer
        weights = self.weights(q, k, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        return self.combine(weights, v).astype(q.dtype)

    def weights(
        self,
        q: jax.Array,
        k: jax.Array,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """float32[..., H, T, T]: how much of each key's value a query gets; rows add up to 1, less with sinks."""
        num_kv_heads = k.shape[-2]
        groups = q.astype(jnp.float32).reshape(*q.shape[:-2], num_kv_heads, -1, q.shape[-1])
        k = k.astype(jnp.float32)
        scores = scale * jnp.einsum("...tkgd,...skd->...kgts", groups, k)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        query, key = self.positions[..., :, None], self.positions[..., None, :]
        visible = key <= query
        if self.pictures is not None and not (window is None and self.causal_without_window):
            of_query, of_key = self.pictures[..., :, None], self.pictures[..., None, :]
            visible |= (of_query == of_key) & (of_query >= 0)
        if window is not None:
            visible &= key > query - window
        scores = jnp.where(visible[..., None, None, :, :], scores, -jnp.inf)
        if sinks is not None:
            sink = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1, 1)
            sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)
        if sinks is not None:
            weights = weights[..., :-1]
        return weights.reshape(*weights.shape[:-4], -1, *weights.shape[-2:])

    def combine(self, weights: jax.Array, v: jax.Array) -> jax.Array:
        """float32[..., T, H, V] of `weights` and v [..., T, K, V]."""
        num_kv_heads = v.shape[-2]
        by_head = (num_kv_heads, -1, *weights.shape[-2:])
        groups = weights.reshape(*weights.shape[:-3], *by_head)
        out = jnp.einsum("...kgts,...skd->...tkgd", groups, v.astype(jnp.float32))
        return out.reshape(*out.shape[:-3], -1, out.shape[-1])
