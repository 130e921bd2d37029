"""What vision towers share: layers, attention within segments, and a language model that has a tower.

A tower is the same on every device of a mesh: it is small beside the decoder, and a picture passes it once.

Letters: P patches, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ACTIVATIONS, ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.layers import Constant, Linear, Normal, matmul, param
from jaxpage.models.rope import Rope, frequencies, rotate

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Scores of a query tile against all keys: 4 million of them a head, so that 16 heads take 256 MB.
_MOST_SCORES = 2**22
_MOST_QUERIES = 512
_NOBODY = -2  # the segment of what lies beyond either end

Attend = Callable[
    ..., jax.Array
]  # (q, k, v, *, scale): `attend_within` or `attend_near` of some segments


class PictureLM(CausalLM):
    """A language model with a vision tower, `visual`, whose embeddings stand in the place of tokens."""

    def __init__(self, config: ModelConfig, visual: nnx.Module, **parts: Any):
        super().__init__(config, **parts)
        self.visual = visual


class LayerNorm(nnx.Module):
    """(x - mean) / deviation times the weight plus the bias, in float32, then back to x's dtype. x: [P, E]."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = param((size,), axes=("embed",), init=Constant(1.0), dtype=dtype)
        self.bias = param((size,), axes=("embed",), init=Constant(0.0), dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        values = x.astype(jnp.float32)
        values = values - values.mean(axis=-1, keepdims=True)
        variance = jnp.mean(values * values, axis=-1, keepdims=True)
        weight, bias = (p[...].astype(jnp.float32)[None] for p in (self.weight, self.bias))
        return (values * jax.lax.rsqrt(variance + self.eps) * weight + bias).astype(x.dtype)


class PatchProjection(nnx.Module):
    """A convolution whose stride is its kernel, [out, channels, ...], as a product."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool, stddev: float, dtype: jnp.dtype):
        axes = ("embed",) * len(shape)
        self.weight = param(shape, axes=axes, init=Normal(stddev), dtype=dtype)
        offset = param(shape[:1], axes=axes[:1], init=Constant(0.0), dtype=dtype)
        self.bias = offset if bias else None

    def __call__(self, patches: jax.Array) -> jax.Array:
        """[P, values of a patch] -> [P, out] in the dtype of the weight."""
        weight = self.weight[...]
        product = matmul(patches.astype(weight.dtype), weight.reshape(weight.shape[0], -1))
        if self.bias is not None:
            product += self.bias[...].astype(product.dtype)[None]
        return product.astype(weight.dtype)


def linear(shape: tuple[int, int], *, stddev: float, dtype: jnp.dtype) -> Linear:
    """A layer [out, in] with bias, the same on every device."""
    return Linear(shape, axes=("embed", "embed"), bias=True, init=Normal(stddev), dtype=dtype)


class RotaryAttention(nnx.Module):
    """Attention of patches that turn by their row and column. Which see each other is an argument."""

    def __init__(self, size: int, num_heads: int, *, stddev: float, dtype: jnp.dtype):
        self.num_heads = num_heads
        self.qkv = linear((3 * size, size), stddev=stddev, dtype=dtype)
        self.proj = linear((size, size), stddev=stddev, dtype=dtype)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend
    ) -> jax.Array:
        qkv = self.qkv(x).reshape(x.shape[0], 3, self.num_heads, -1)
        # In float32, as transformers does.
        q, k = (rotate(qkv[:, i].astype(jnp.float32), *rotation).astype(x.dtype) for i in (0, 1))
        out = attend(q, k, qkv[:, 2], scale=q.shape[-1] ** -0.5)
        return self.proj(out.reshape(x.shape))


def axial_angles(places: jax.Array, *, theta: float, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[P, 1, head_dim / 2], of int32[2, P] rows and columns.

    Half of the frequencies turn by a patch's row, the others by its column.
    """
    one = frequencies(theta, head_dim // 2)
    rope = Rope((*one, *one), sections=(0,) * len(one) + (1,) * len(one))
    return rope.angles(places, jnp.dtype(jnp.float32), three=True)


def check_tower(hf: PretrainedConfig) -> None:
    """Of a tower with `RotaryAttention`. Raises ValueError for what cannot be served."""
    if hf.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"the vision tower has activation {hf.hidden_act!r}; supported are {', '.join(ACTIVATIONS)}"
        )
    if hf.hidden_size % (4 * hf.num_heads):
        raise ValueError(
            f"the vision tower has {hf.num_heads} heads for hidden_size {hf.hidden_size}; the size of a head "
            "must be a multiple of 4"
        )


def check_embeddings(size: int, text: PretrainedConfig) -> None:
    """Raises ValueError if a tower makes embeddings of another size than the decoder's."""
    if size != text.hidden_size:
        raise ValueError(
            f"the vision tower makes embeddings of {size} values, the decoder has {text.hidden_size}; correct "
            "config.json"
        )


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
