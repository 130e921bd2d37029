"""Shared by vision towers: layers, attention within segments, and a language model with a tower.

A tower is replicated over the mesh: it is small compared with the decoder, and encodes a picture once.

Letters: P patches, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ModelConfig, activation_of
from jaxpage.models.decoder import CausalLM
from jaxpage.models.layers import Constant, Linear, Normal, param
from jaxpage.models.rope import Rope, frequencies
from jaxpage.ops.matmul import matmul
from pallas_kernels.rope.xla import rotate

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Scores of a query tile and all keys: 4 million per head, so 16 heads take 256 MB.
_MOST_SCORES = 2**22
_MOST_QUERIES = 512
_MOST_NEAR = 4096  # queries of short segments processed at once
_NOBODY = -2  # the segment of padding at both ends

Attend = Callable[
    ..., jax.Array
]  # (q, k, v, *, scale): `attend_within` or `attend_near` with given segments


class PictureLM(CausalLM):
    """A language model with a vision tower, `visual`, whose embeddings replace those of tokens."""

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
    """A convolution whose stride equals its kernel size, [out, channels, ...], as a product."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool, stddev: float, dtype: jnp.dtype):
        axes = ("embed",) * len(shape)
        self.weight = param(shape, axes=axes, init=Normal(stddev), dtype=dtype)
        offset = param(shape[:1], axes=axes[:1], init=Constant(0.0), dtype=dtype)
        self.bias = offset if bias else None

    def __call__(self, patches: jax.Array) -> jax.Array:
        """[P, values of a patch] -> [P, out] in the weight's dtype."""
        weight = self.weight[...]
        product = matmul(patches.astype(weight.dtype), weight.reshape(weight.shape[0], -1))
        if self.bias is not None:
            product += self.bias[...].astype(product.dtype)[None]
        return product.astype(weight.dtype)


def linear(shape: tuple[int, int], *, stddev: float, dtype: jnp.dtype) -> Linear:
    """A linear layer [out, in] with bias, replicated over the mesh."""
    return Linear(shape, axes=("embed", "embed"), bias=True, init=Normal(stddev), dtype=dtype)


class RotaryAttention(nnx.Module):
    """Attention of patches with RoPE by row and column. The mask is an argument."""

    def __init__(self, size: int, num_heads: int, *, stddev: float, dtype: jnp.dtype):
        self.num_heads = num_heads
        self.qkv = linear((3 * size, size), stddev=stddev, dtype=dtype)
        self.proj = linear((size, size), stddev=stddev, dtype=dtype)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend
    ) -> jax.Array:
        qkv = self.qkv(x).reshape(x.shape[0], 3, self.num_heads, -1)
        # In float32, like transformers.
        q, k = (qkv[:, i].astype(jnp.float32) for i in (0, 1))
        q, k = (part.astype(x.dtype) for part in rotate([q, k], *rotation))
        out = attend(q, k, qkv[:, 2], scale=q.shape[-1] ** -0.5)
        return self.proj(out.reshape(x.shape))


def axial_angles(places: jax.Array, *, theta: float, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[P, 1, head_dim / 2], of int32[2, P] rows and columns.

    Half of the frequencies rotate by a patch's row, the others by its column.
    """
    one = frequencies(theta, head_dim // 2)
    rope = Rope((*one, *one), sections=(0,) * len(one) + (1,) * len(one))
    return rope.angles(places, jnp.dtype(jnp.float32), three=True)


def check_tower(hf: PretrainedConfig) -> None:
    """For a tower with `RotaryAttention`. Raises ValueError for what is not supported."""
    activation_of(hf, "the vision tower")
    if hf.hidden_size % (4 * hf.num_heads):
        raise ValueError(
            f"the vision tower has {hf.num_heads} heads for hidden_size {hf.hidden_size}; the size of a head "
            "must be a multiple of 4"
        )


def check_embeddings(size: int, text: PretrainedConfig) -> None:
    """Raises ValueError if a tower's embeddings have another size than the decoder's."""
    if size != text.hidden_size:
        raise ValueError(
            f"the vision tower makes embeddings of {size} values, the decoder has {text.hidden_size}; correct "
            "config.json"
        )


def attend_within(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *, scale: float
) -> jax.Array:
    """Attention of each patch to its whole segment. q, k, v [P, H, D], segments int32[P]; returns [P, H, D].

    In tiles of queries, so that memory grows linearly with P. Softmax is float32.
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
    """`attend_within` for contiguous segments of at most `longest` patches: a tile sees itself and both neighbours."""
    num_patches = q.shape[0]
    if num_patches <= 3 * longest:
        return attend_within(q, k, v, segments, scale=scale)
    num_tiles = -(-num_patches // longest)
    at_once = min(num_tiles, max(_MOST_NEAR // longest, 1))
    num_turns = -(-num_tiles // at_once)

    def tiles(x: jax.Array, fill: int) -> jax.Array:
        """[1 + num_turns * at_once + 1, longest, ...]"""
        after = (num_turns * at_once + 1) * longest - num_patches
        padding = [(longest, after)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding, constant_values=fill).reshape(-1, longest, *x.shape[1:])

    queries, keys, values, of_all = tiles(q, 0), tiles(k, 0), tiles(v, 0), tiles(segments, _NOBODY)
    attend = jax.vmap(_attend, in_axes=(0, 0, 0, 0, 0, None))

    def one_turn(first: jax.Array | int) -> jax.Array:
        def own(x: jax.Array, offset: int = 1) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, first + offset, at_once)

        def near(x: jax.Array) -> jax.Array:
            return jnp.concatenate([own(x, offset) for offset in range(3)], axis=1)

        return attend(own(queries), near(keys), near(values), own(of_all), near(of_all), scale)

    turns = jnp.arange(num_turns, dtype=jnp.int32) * at_once
    out = one_turn(0) if num_turns == 1 else jax.lax.map(one_turn, turns)
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
    # Not -inf: padding rows of a last tile would be NaN.
    weights = jax.nn.softmax(jnp.where(same, scores, jnp.finfo(jnp.float32).min), axis=-1)
    weights = weights.astype(v.dtype)
    return jnp.einsum("hqk,khd->qhd", weights, v, preferred_element_type=jnp.float32).astype(
        q.dtype
    )


def _tiles(x: jax.Array, tile: int, fill: int) -> jax.Array:
    """[P, ...] to [tiles, tile, ...], padded."""
    missing = -x.shape[0] % tile
    padding = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding, constant_values=fill).reshape(-1, tile, *x.shape[1:])
