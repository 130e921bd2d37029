"""The SigLIP tower of Gemma 3, and the projector that pools its patches to embeddings of the decoder.

Attribute paths are the checkpoint's names, below `visual`. Letters: P patches, E dim of the tower.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.layers import ACTIVATION_FUNCTIONS, Embedding, Normal, OffsetRMSNorm, param
from jaxpage.models.vision import LayerNorm, PatchProjection, attend_within, linear
from jaxpage.pictures.gemma3 import SiglipConfig


class PatchEmbeddings(nnx.Module):
    """Embeddings of patches plus learned positions."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype):
        size, side, stddev = config.hidden_size, config.patch_size, config.initializer_range
        shape = (size, config.in_channels, side, side)
        self.patch_embedding = PatchProjection(shape, bias=True, stddev=stddev, dtype=dtype)
        self.position_embedding = Embedding(
            config.side**2, size, init=Normal(size**-0.5), dtype=dtype
        )

    def __call__(self, patches: jax.Array, places: jax.Array) -> jax.Array:
        return self.patch_embedding(patches) + self.position_embedding(places)


class VisionAttention(nnx.Module):
    """Full attention between all patches of a picture."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype):
        self.config = config
        shape, stddev = (config.hidden_size, config.hidden_size), config.initializer_range
        self.q_proj = linear(shape, stddev=stddev, dtype=dtype)
        self.k_proj = linear(shape, stddev=stddev, dtype=dtype)
        self.v_proj = linear(shape, stddev=stddev, dtype=dtype)
        self.out_proj = linear(shape, stddev=stddev, dtype=dtype)

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        heads = (x.shape[0], self.config.num_heads, -1)
        q, k, v = (p(x).reshape(heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = attend_within(q, k, v, segments, scale=q.shape[-1] ** -0.5)
        return self.out_proj(out.reshape(x.shape))


class VisionMLP(nnx.Module):
    """fc2(activation(fc1(x)))"""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype):
        size, inner = config.hidden_size, config.intermediate_size
        stddev, self.activation = config.initializer_range, config.activation
        self.fc1 = linear((inner, size), stddev=stddev, dtype=dtype)
        self.fc2 = linear((size, inner), stddev=stddev, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(ACTIVATION_FUNCTIONS[self.activation](self.fc1(x)))


class VisionLayer(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype):
        size, eps = config.hidden_size, config.norm_eps
        self.layer_norm1 = LayerNorm(size, eps=eps, dtype=dtype)
        self.self_attn = VisionAttention(config, dtype)
        self.layer_norm2 = LayerNorm(size, eps=eps, dtype=dtype)
        self.mlp = VisionMLP(config, dtype)

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.layer_norm1(x), segments)
        return x + self.mlp(self.layer_norm2(x))


class VisionLayers(nnx.Module):
    """The layers; a module only for the checkpoint's names."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype):
        self.layers = nnx.List([VisionLayer(config, dtype) for _ in range(config.depth)])


class Projector(nnx.Module):
    """The mean of neighbouring patches, a norm, and a product."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype):
        size, self.group = config.hidden_size, config.patches_per_token
        self.mm_input_projection_weight = param(
            (size, config.out_hidden_size),
            axes=("embed", "embed"),
            init=Normal(config.initializer_range),
            dtype=dtype,
        )
        self.mm_soft_emb_norm = OffsetRMSNorm(size, axis="embed", eps=config.norm_eps, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[P, E] -> [P / patches_per_token, E of the decoder]"""
        pooled = x.astype(jnp.float32).reshape(-1, self.group, x.shape[-1]).mean(axis=1)
        normed = self.mm_soft_emb_norm(pooled.astype(x.dtype))
        weight = self.mm_input_projection_weight[...]
        return jnp.matmul(normed, weight, preferred_element_type=jnp.float32).astype(x.dtype)


class SiglipTower(nnx.Module):
    """The encoder of Gemma 3; its inputs are those of `SiglipConfig.encoder_inputs`."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype):
        self.embeddings = PatchEmbeddings(config, dtype)
        self.encoder = VisionLayers(config, dtype)
        self.post_layernorm = LayerNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.multi_modal_projector = Projector(config, dtype)

    def __call__(self, *, patches: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        x = self.embeddings(patches, places)
        for layer in self.encoder.layers:
            x = layer(x, segments)
        return self.multi_modal_projector(self.post_layernorm(x))
