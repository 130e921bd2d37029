"""The Pixtral tower of Mistral 3, and the projector that merges its patches to embeddings of the decoder.

Attribute paths are the checkpoint's names, below `visual`. Formulas: transformers' `PixtralVisionModel` and
`Mistral3MultiModalProjector`. Letters: P patches, E dim of the tower, H heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ModelConfig, activation_of
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, Linear, Normal, RMSNorm
from jaxpage.models.llama_like import mistral3_config
from jaxpage.models.rope import Rope, frequencies
from jaxpage.models.vision import PatchProjection, PictureLM, attend_within
from jaxpage.pictures.pixtral import PixtralVisionConfig, pixtral_vision_config
from pallas_kernels.rope.xla import rotate

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NORM_EPS = 1e-5  # fixed in transformers too


def _linear(
    shape: tuple[int, int], config: PixtralVisionConfig, dtype: jnp.dtype, *, bias: bool = False
) -> Linear:
    init = Normal(config.initializer_range)
    return Linear(shape, axes=("embed", "embed"), bias=bias, init=init, dtype=dtype)


def _norm(config: PixtralVisionConfig, dtype: jnp.dtype, eps: float = _NORM_EPS) -> RMSNorm:
    return RMSNorm(config.hidden_size, axis="embed", eps=eps, dtype=dtype)


class VisionAttention(nnx.Module):
    """Full attention between all patches of a picture."""

    def __init__(self, config: PixtralVisionConfig, dtype: jnp.dtype):
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        shape = (config.hidden_size, config.hidden_size)
        self.q_proj = _linear(shape, config, dtype)
        self.k_proj = _linear(shape, config, dtype)
        self.v_proj = _linear(shape, config, dtype)
        self.o_proj = _linear(shape, config, dtype)

    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], segments: jax.Array
    ) -> jax.Array:
        heads = (x.shape[0], self.num_heads, self.head_dim)
        q, k, v = (p(x).reshape(heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate([q, k], *angles)
        out = attend_within(q, k, v, segments, scale=self.head_dim**-0.5)
        return self.o_proj(out.reshape(x.shape))


class VisionMLP(nnx.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, config: PixtralVisionConfig, dtype: jnp.dtype):
        self.activation = config.activation
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _linear((inner, size), config, dtype)
        self.up_proj = _linear((inner, size), config, dtype)
        self.down_proj = _linear((size, inner), config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = ACTIVATION_FUNCTIONS[self.activation](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class VisionLayer(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual."""

    def __init__(self, config: PixtralVisionConfig, dtype: jnp.dtype):
        self.attention_norm = _norm(config, dtype)
        self.attention = VisionAttention(config, dtype)
        self.ffn_norm = _norm(config, dtype)
        self.feed_forward = VisionMLP(config, dtype)

    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], segments: jax.Array
    ) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), angles, segments)
        return x + self.feed_forward(self.ffn_norm(x))


class VisionLayers(nnx.Module):
    """The layers; a module only for the checkpoint's names."""

    def __init__(self, config: PixtralVisionConfig, dtype: jnp.dtype):
        self.layers = nnx.List([VisionLayer(config, dtype) for _ in range(config.depth)])


class PatchMerger(nnx.Module):
    """Joins the patches of a square, value by value."""

    def __init__(self, config: PixtralVisionConfig, dtype: jnp.dtype):
        self.group = config.patches_per_token
        shape = (config.hidden_size, config.hidden_size * self.group)
        self.merging_layer = _linear(shape, config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[P, E] -> [P / patches_per_token, E]"""
        squares = x.reshape(-1, self.group, x.shape[-1]).swapaxes(1, 2)
        return self.merging_layer(squares.reshape(squares.shape[0], -1))


class Projector(nnx.Module):
    """A norm, the merger, and an MLP."""

    def __init__(self, config: PixtralVisionConfig, dtype: jnp.dtype):
        self.activation = config.projector_activation
        size, bias = config.out_hidden_size, config.projector_bias
        self.norm = _norm(config, dtype, config.norm_eps)
        self.patch_merger = PatchMerger(config, dtype)
        self.linear_1 = _linear((size, config.hidden_size), config, dtype, bias=bias)
        self.linear_2 = _linear((size, size), config, dtype, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[P, E] -> [P / patches_per_token, E of the decoder]"""
        merged = self.patch_merger(self.norm(x))
        return self.linear_2(ACTIVATION_FUNCTIONS[self.activation](self.linear_1(merged)))


class PixtralTower(nnx.Module):
    """The encoder of Mistral 3; its inputs are those of `PixtralVisionConfig.encoder_inputs`."""

    def __init__(self, config: PixtralVisionConfig, dtype: jnp.dtype):
        self.config = config
        side = config.patch_size
        shape = (config.hidden_size, 3, side, side)
        stddev = config.initializer_range
        self.patch_conv = PatchProjection(shape, bias=False, stddev=stddev, dtype=dtype)
        self.ln_pre = _norm(config, dtype)
        self.transformer = VisionLayers(config, dtype)
        self.multi_modal_projector = Projector(config, dtype)

    def __call__(self, *, patches: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        x = self.ln_pre(self.patch_conv(patches))
        angles = _angles(places, self.config, x.dtype)
        for layer in self.transformer.layers[: self.config.last_layer]:
            x = layer(x, angles, segments)
        return self.multi_modal_projector(x)


def _angles(
    places: jax.Array, config: PixtralVisionConfig, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, dtype[P, 1, D / 2], of int32[2, P] rows and columns.

    Every other frequency of the head, from the first on, rotates by a patch's row, the others by its column.
    """
    each = frequencies(config.rope_theta, config.head_dim)
    half = len(each) // 2
    rope = Rope((*each[0::2], *each[1::2]), sections=(0,) * half + (1,) * half)
    return rope.angles(places, dtype, three=True)


def mistral3_with_pictures(config: ModelConfig) -> PictureLM:
    """A Mistral 3 with its vision tower."""
    assert isinstance(config.vision, PixtralVisionConfig)
    return PictureLM(config, PixtralTower(config.vision, config.dtype))


def mistral3_pictures_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Mistral3ForConditionalGeneration. Raises ValueError for what is not supported."""
    vision = pixtral_vision_config(hf)
    activation_of(hf.vision_config, "the vision tower")
    if vision.projector_activation not in ACTIVATION_FUNCTIONS:
        known = ", ".join(ACTIVATION_FUNCTIONS)
        raise ValueError(
            f"projector_hidden_act is {vision.projector_activation!r}; supported are {known}"
        )
    return mistral3_config(hf, dtype=dtype, max_model_len=max_model_len, vision=vision)
