"""What vision towers share: attention within segments, and a language model that has a tower.

Letters: P patches, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM

# Scores of a query tile against all keys: 4 million of them a head, so that 16 heads take 256 MB.
_MOST_SCORES = 2**22
_MOST_QUERIES = 512
_NOBODY = -2  # the segment of what lies beyond either end


class PictureLM(CausalLM):
    """A language model with a vision tower, `visual`, whose embeddings stand in the place of tokens."""

    def __init__(self, config: ModelConfig, visual: nnx.Module, **parts: Any):
        super().__init__(config, **parts)
        self.visual = visual


def attend_within(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, scale: float
) -> jax.Array:
    """Attention of each patch to all of its segment. q, k, v [P, H, D], segments int32[P]; returns [P, H, D].

    In tiles of queries, so that memory grows with P. Softmax is float32.
    """
    num_patches = q.shape[0]
    tile = min(num_patches, _MOST_QUERIES, max(64, _MOST_SCORES // num_patches))
    queries, of_queries = _tiles(q, tile, 0), _tiles(segments, tile, _NOBODY)

    def one(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _attend(tile[0], k, v, tile[1], segments, scale)

    out = (
        one((queries[0], of_queries[0]))[None]
        if len(queries) == 1
        else jax.lax.map(one, (queries, of_queries))
    )
    return out.reshape(-1, *q.shape[1:])[:num_patches]


def attend_near(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, scale: float, longest: int
) -> jax.Array:
    """`attend_within` of segments that are runs of at most `longest` patches: each tile sees itself and both beside."""
    num_patches = q.shape[0]
    if num_patches <= 3 * longest:
        return attend_within(q, k, v, segments, scale=scale)
    queries, keys, values = (_tiles(x, longest, 0) for x in (q, k, v))
    of_queries = _tiles(segments, longest, _NOBODY)
    out = jax.vmap(_attend, in_axes=(0, 0, 0, 0, 0, None))(
        queries,
        _with_neighbours(keys, 0),
        _with_neighbours(values, 0),
        of_queries,
        _with_neighbours(of_queries, _NOBODY),
        scale,
    )
    return out.reshape(-1, *q.shape[1:])[:num_patches]


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    of_queries: jax.Array,
    of_keys: jax.Array,
    scale: float,
) -> jax.Array:
    scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * scale
    same = of_queries[:, None] == of_keys[None, :]
    # Not -inf: rows of a last tile that are nobody's would be NaN.
    weights = jax.nn.softmax(jnp.where(same, scores, jnp.finfo(jnp.float32).min), axis=-1)
    weights = weights.astype(v.dtype)
    return jnp.einsum("hqk,khd->qhd", weights, v, preferred_element_type=jnp.float32).astype(
        q.dtype
    )


def _tiles(x: jax.Array, tile: int, fill: int) -> jax.Array:
    """[P, ...] to [tiles, tile, ...], the last one filled up."""
    missing = -x.shape[0] % tile
    padding = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding, constant_values=fill).reshape(-1, tile, *x.shape[1:])


def _with_neighbours(tiles: jax.Array, fill: int) -> jax.Array:
    """[tiles, tile, ...] to [tiles, 3 * tile, ...]: with the tile before and the one after."""
    edge = jnp.full_like(tiles[:1], fill)
    before = jnp.concatenate([edge, tiles[:-1]])
    after = jnp.concatenate([tiles[1:], edge])
    return jnp.concatenate([before, tiles, after], axis=1)
