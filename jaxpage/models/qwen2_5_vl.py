"""Qwen2.5-VL: a vision tower that attends within windows, before the decoder of Qwen2.

Attribute paths are the checkpoint's names. The tower is the same on every device of a mesh: it is small beside the
decoder, and a picture passes it once. Knows transformers' names of the options.

Letters: P patches, E dim of the tower, H heads, D head dim, F MLP dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ACTIVATIONS, ModelConfig, decoder_config
from jaxpage.models.layers import (
    ACTIVATION_FUNCTIONS,
    Linear,
    Normal,
    RMSNorm,
    matmul,
    param,
)
from jaxpage.models.rope import Rope, frequencies, rotate
from jaxpage.models.sources import Source
from jaxpage.models.vision import PictureLM, attend_near, attend_within
from jaxpage.pictures.qwen_vision import QwenVisionConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NORM_EPS = 1e-6  # fixed in transformers too
_MROPE_SECTION = [16, 24, 24]  # where config.json has none


def linear(config: QwenVisionConfig, dtype: jnp.dtype, shape: tuple[int, int]) -> Linear:
    """A layer [out, in] of the tower, with bias."""
    init = Normal(config.initializer_range)
    return Linear(shape, axes=("embed", "embed"), bias=True, init=init, dtype=dtype)


def norm(config: QwenVisionConfig, dtype: jnp.dtype) -> RMSNorm:
    """A norm of patches."""
    return RMSNorm(config.hidden_size, axis="embed", eps=_NORM_EPS, dtype=dtype)


class PatchProjection(nnx.Module):
    """A convolution whose stride is its kernel, as a product."""

    def __init__(self, config: QwenVisionConfig, dtype: jnp.dtype):
        side = config.patch_size
        shape = (config.hidden_size, config.in_channels, config.frames_per_patch, side, side)
        init = Normal(config.initializer_range)
        self.weight = param(shape, axes=("embed",) * 5, init=init, dtype=dtype)

    def __call__(self, patches: jax.Array) -> jax.Array:
        """[P, C * frames * side * side] -> [P, E]"""
        weight = self.weight[...]
        product = matmul(patches.astype(weight.dtype), weight.reshape(weight.shape[0], -1))
        return product.astype(weight.dtype)


class PatchEmbedding(nnx.Module):
    """The first layer of the tower; a module for the sake of the checkpoint's names."""

    def __init__(self, config: QwenVisionConfig, dtype: jnp.dtype):
        self.proj = PatchProjection(config, dtype)

    def __call__(self, patches: jax.Array) -> jax.Array:
        return self.proj(patches)


class VisionAttention(nnx.Module):
    """Attention within a window, or within a frame."""

    def __init__(self, config: QwenVisionConfig, dtype: jnp.dtype, *, full: bool):
        size = config.hidden_size
        self.config, self.full = config, full
        self.qkv = linear(config, dtype, (3 * size, size))
        self.proj = linear(config, dtype, (size, size))

    def __call__(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        windows: jax.Array,
        frames: jax.Array,
    ) -> jax.Array:
        config = self.config
        qkv = self.qkv(x).reshape(x.shape[0], 3, config.num_heads, config.head_dim)
        # Angles of a picture's rows and columns are small numbers apart: rotated in float32, as transformers does.
        q, k = (rotate(qkv[:, i].astype(jnp.float32), *rotation).astype(x.dtype) for i in (0, 1))
        scale = config.head_dim**-0.5
        if self.full:
            out = attend_within(q, k, qkv[:, 2], frames, scale=scale)
        else:
            longest = config.window_patches
            out = attend_near(q, k, qkv[:, 2], windows, scale=scale, longest=longest)
        return self.proj(out.reshape(x.shape))


class VisionMLP(nnx.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, config: QwenVisionConfig, dtype: jnp.dtype):
        size, inner = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.gate_proj = linear(config, dtype, (inner, size))
        self.up_proj = linear(config, dtype, (inner, size))
        self.down_proj = linear(config, dtype, (size, inner))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = ACTIVATION_FUNCTIONS[self.activation](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class VisionBlock(nnx.Module):
    """Attention and MLP, each after a norm and beside a residual."""

    def __init__(self, config: QwenVisionConfig, dtype: jnp.dtype, *, full: bool):
        self.norm1 = norm(config, dtype)
        self.attn = VisionAttention(config, dtype, full=full)
        self.norm2 = norm(config, dtype)
        self.mlp = VisionMLP(config, dtype)

    def __call__(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        windows: jax.Array,
        frames: jax.Array,
    ) -> jax.Array:
        x = x + self.attn(self.norm1(x), rotation, windows, frames)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nnx.Module):
    """Neighbouring patches, joined, to one embedding of the decoder."""

    def __init__(self, config: QwenVisionConfig, dtype: jnp.dtype):
        size = config.hidden_size * config.patches_per_token
        self.ln_q = norm(config, dtype)
        self.inner = linear(config, dtype, (size, size))
        self.outer = linear(config, dtype, (config.out_hidden_size, size))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[P, E] -> [P / patches_per_token, E of the decoder]"""
        joined = self.ln_q(x).reshape(-1, self.inner.weight.get_value().shape[1])
        return self.outer(ACTIVATION_FUNCTIONS["gelu"](self.inner(joined)))


class QwenVisionTower(nnx.Module):
    """The encoder of Qwen2.5-VL; its inputs are those of `QwenVisionConfig.encoder_inputs`."""

    def __init__(self, config: QwenVisionConfig, dtype: jnp.dtype):
        self.config = config
        full = config.full_attention_layers
        self.patch_embed = PatchEmbedding(config, dtype)
        self.blocks = nnx.List(
            [VisionBlock(config, dtype, full=index in full) for index in range(config.depth)]
        )
        self.merger = PatchMerger(config, dtype)

    def __call__(
        self,
        *,
        patches: jax.Array,
        places: jax.Array,
        windows: jax.Array,
        frames: jax.Array,
        order: jax.Array,
    ) -> jax.Array:
        x = self.patch_embed(patches)
        rotation = _rope(self.config).angles(places, jnp.dtype(jnp.float32), three=True)
        for block in self.blocks:
            x = block(x, rotation, windows, frames)
        return self.merger(x)[order]


def _rope(config: QwenVisionConfig) -> Rope:
    """Half of the frequencies turn by a patch's row, the others by its column."""
    half = config.head_dim // 2
    one = frequencies(config.rope_theta, half)
    return Rope((*one, *one), sections=(0,) * len(one) + (1,) * len(one))


def qwen2_5_vl(config: ModelConfig) -> PictureLM:
    """A Qwen2.5-VL."""
    assert isinstance(config.vision, QwenVisionConfig)
    return PictureLM(config, QwenVisionTower(config.vision, config.dtype))


def qwen2_5_vl_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Qwen2_5_VLForConditionalGeneration. Raises ValueError for what cannot be served."""
    text = hf.get_text_config()
    text.rope_parameters.setdefault("mrope_section", _MROPE_SECTION)
    vision = _vision_config(hf.vision_config)
    if vision.out_hidden_size != text.hidden_size:
        raise ValueError(
            f"the vision tower makes embeddings of {vision.out_hidden_size} values, the decoder has "
            f"{text.hidden_size}; correct config.json"
        )
    return decoder_config(
        text,
        dtype=dtype,
        max_model_len=max_model_len,
        architecture=(hf.architectures or ["?"])[0],
        qkv_bias=True,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        vision=vision,
    )


def _vision_config(hf: PretrainedConfig) -> QwenVisionConfig:
    if hf.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"the vision tower has activation {hf.hidden_act!r}; supported are {', '.join(ACTIVATIONS)}"
        )
    if hf.hidden_size % (4 * hf.num_heads):
        raise ValueError(
            f"the vision tower has {hf.num_heads} heads for hidden_size {hf.hidden_size}; the size of a head "
            "must be a multiple of 4"
        )
    return QwenVisionConfig(
        depth=hf.depth,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_heads,
        intermediate_size=hf.intermediate_size,
        out_hidden_size=hf.out_hidden_size,
        activation=hf.hidden_act,
        in_channels=hf.in_channels,
        patch_size=hf.patch_size,
        frames_per_patch=hf.temporal_patch_size,
        merge_size=hf.spatial_merge_size,
        window_size=hf.window_size,
        full_attention_layers=tuple(hf.fullatt_block_indexes),
        rope_theta=hf.rope_parameters["rope_theta"],
        initializer_range=hf.initializer_range,
    )


def merger_names(config: ModelConfig) -> dict[str, Source]:
    """The two layers of the merger have numbers for names."""
    del config
    return {
        f"visual.merger.{ours}.{part}": Source(f"visual.merger.mlp.{theirs}.{part}")
        for ours, theirs in (("inner", 0), ("outer", 2))
        for part in ("weight", "bias")
    }
