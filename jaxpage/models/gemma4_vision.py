"""The vision tower of Gemma 4, and the projection of its pooled patches to embeddings of the decoder.

Attribute paths are the checkpoint's names, below `visual`. Formulas: transformers' `Gemma4VisionModel` and
`Gemma4MultimodalEmbedder`. Letters: P patches, E dim of the tower, H heads, D head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.layers import (
    ACTIVATION_FUNCTIONS,
    Constant,
    Linear,
    Normal,
    WideRMSNorm,
    normalise,
    param,
)
from jaxpage.models.rope import Rope, frequencies
from jaxpage.models.vision import attend_within
from jaxpage.pictures.gemma4 import Gemma4VisionConfig
from pallas_kernels.rope.xla import rotate

_BOUNDS = {
    "input_min": -jnp.inf,
    "input_max": jnp.inf,
    "output_min": -jnp.inf,
    "output_max": jnp.inf,
}


def _linear(shape: tuple[int, int], config: Gemma4VisionConfig, dtype: jnp.dtype) -> Linear:
    init = Normal(config.initializer_range)
    return Linear(shape, axes=("embed", "embed"), bias=False, init=init, dtype=dtype)


def _norm(size: int, config: Gemma4VisionConfig, dtype: jnp.dtype) -> WideRMSNorm:
    return WideRMSNorm(size, axis="embed", eps=config.norm_eps, dtype=dtype)


class ClippedLinear(nnx.Module):
    """A linear layer without bias, whose inputs and outputs may be clipped at bounds of the checkpoint."""

    def __init__(self, shape: tuple[int, int], config: Gemma4VisionConfig, dtype: jnp.dtype):
        self.clips = config.clips
        self.linear = _linear(shape, config, dtype)
        for name, bound in _BOUNDS.items() if config.clips else ():
            setattr(self, name, param((), axes=(), init=Constant(bound), dtype=dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.clips:
            return self.linear(x)
        bounds = {name: getattr(self, name)[...] for name in _BOUNDS}
        out = self.linear(jnp.clip(x, bounds["input_min"], bounds["input_max"]))
        return jnp.clip(out, bounds["output_min"], bounds["output_max"])


class PatchEmbedder(nnx.Module):
    """A projection of pixels, and embeddings of column and row."""

    def __init__(self, config: Gemma4VisionConfig, dtype: jnp.dtype):
        self.input_proj = _linear((config.hidden_size, config.patch_values), config, dtype)
        self.position_embedding_table = param(
            (2, config.num_places, config.hidden_size),
            axes=("embed",) * 3,
            init=Normal(config.initializer_range),
            dtype=dtype,
        )

    def __call__(self, patches: jax.Array, places: jax.Array) -> jax.Array:
        columns, rows = self.position_embedding_table[...]
        x = self.input_proj(patches.astype(columns.dtype))
        return x + (columns.at[places[0]].get(mode="clip") + rows.at[places[1]].get(mode="clip"))


class VisionAttention(nnx.Module):
    """Full attention between all patches of a picture. Half of a head is turned by the column, the other by the row."""

    def __init__(self, config: Gemma4VisionConfig, dtype: jnp.dtype):
        self.config = config
        size, inner = config.hidden_size, config.num_heads * config.head_dim
        self.q_proj = ClippedLinear((inner, size), config, dtype)
        self.k_proj = ClippedLinear((inner, size), config, dtype)
        self.v_proj = ClippedLinear((inner, size), config, dtype)
        self.o_proj = ClippedLinear((size, inner), config, dtype)
        self.q_norm = _norm(config.head_dim, config, dtype)
        self.k_norm = _norm(config.head_dim, config, dtype)

    def __call__(self, x: jax.Array, angles: list[tuple], segments: jax.Array) -> jax.Array:
        config = self.config
        heads = (x.shape[0], config.num_heads, config.head_dim)
        q, k, v = (p(x).reshape(heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        halves = (jnp.split(part, 2, axis=-1) for part in (self.q_norm(q), self.k_norm(k)))
        turned = [
            rotate(list(pair), *by)
            for pair, by in zip(zip(*halves, strict=True), angles, strict=True)
        ]
        q, k = (jnp.concatenate(parts, axis=-1) for parts in zip(*turned, strict=True))
        v = normalise(v, config.norm_eps).astype(v.dtype)
        out = attend_within(q, k, v, segments, scale=1.0)
        return self.o_proj(out.reshape(x.shape[0], -1))


class VisionMLP(nnx.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, config: Gemma4VisionConfig, dtype: jnp.dtype):
        self.activation = config.activation
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = ClippedLinear((inner, size), config, dtype)
        self.up_proj = ClippedLinear((inner, size), config, dtype)
        self.down_proj = ClippedLinear((size, inner), config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = ACTIVATION_FUNCTIONS[self.activation](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class VisionLayer(nnx.Module):
    """Attention and MLP, with norms before and after each, and residuals."""

    def __init__(self, config: Gemma4VisionConfig, dtype: jnp.dtype):
        size = config.hidden_size
        self.input_layernorm = _norm(size, config, dtype)
        self.self_attn = VisionAttention(config, dtype)
        self.post_attention_layernorm = _norm(size, config, dtype)
        self.pre_feedforward_layernorm = _norm(size, config, dtype)
        self.mlp = VisionMLP(config, dtype)
        self.post_feedforward_layernorm = _norm(size, config, dtype)

    def __call__(self, x: jax.Array, angles: list[tuple], segments: jax.Array) -> jax.Array:
        attended = self.self_attn(self.input_layernorm(x), angles, segments)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class VisionLayers(nnx.Module):
    """The layers; a module only for the checkpoint's names."""

    def __init__(self, config: Gemma4VisionConfig, dtype: jnp.dtype):
        self.layers = nnx.List([VisionLayer(config, dtype) for _ in range(config.depth)])


class Embedder(nnx.Module):
    """A norm without weights, and a projection."""

    def __init__(self, config: Gemma4VisionConfig, dtype: jnp.dtype):
        self.norm_eps = config.norm_eps
        shape = (config.out_hidden_size, config.hidden_size)
        self.embedding_projection = _linear(shape, config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.embedding_projection(normalise(x, self.norm_eps).astype(x.dtype))


class Gemma4Tower(nnx.Module):
    """The encoder of Gemma 4; its inputs are those of `Gemma4VisionConfig.encoder_inputs`."""

    def __init__(self, config: Gemma4VisionConfig, dtype: jnp.dtype):
        self.config = config
        self.patch_embedder = PatchEmbedder(config, dtype)
        self.encoder = VisionLayers(config, dtype)
        self.embed_vision = Embedder(config, dtype)
        if config.standardises:
            shape = (config.hidden_size,)
            self.std_bias = param(shape, axes=("embed",), init=Constant(0.0), dtype=dtype)
            self.std_scale = param(shape, axes=("embed",), init=Constant(1.0), dtype=dtype)

    def __call__(self, *, patches: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        config = self.config
        x = self.patch_embedder(patches, places)
        rope = Rope(frequencies(config.rope_theta, config.head_dim // 2))
        angles = [rope.angles(each, x.dtype) for each in places]
        for layer in self.encoder.layers:
            x = layer(x, angles, segments)
        return self.embed_vision(self._pooled(x))

    def _pooled(self, x: jax.Array) -> jax.Array:
        """[P, E] -> [P / patches_per_token, E]. In float32 from the mean on: the factor may leave float16's range."""
        config = self.config
        squares = x.astype(jnp.float32).reshape(-1, config.patches_per_token, x.shape[-1])
        pooled = squares.mean(axis=1).astype(x.dtype).astype(jnp.float32) * x.shape[-1] ** 0.5
        if config.standardises:
            bias, scale = (
                each[...].astype(jnp.float32)[None] for each in (self.std_bias, self.std_scale)
            )
            pooled = (pooled - bias) * scale
        return pooled.astype(x.dtype)
