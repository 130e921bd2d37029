"""Qwen2.5-VL: a vision tower with windowed attention, before the decoder of Qwen2.

Attribute paths are the checkpoint's names. Knows transformers' names of the options.

Letters: P patches, E dim of the tower, H heads, D head dim, F MLP dim.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, RMSNorm
from jaxpage.models.sources import Place, Source
from jaxpage.models.vision import (
    Attend,
    PatchProjection,
    PictureLM,
    RotaryAttention,
    attend_near,
    attend_within,
    axial_angles,
    check_embeddings,
    check_tower,
    linear,
)
from jaxpage.pictures.qwen_vision import Qwen25VisionConfig, QwenVisionConfig, shared_fields

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NORM_EPS = 1e-6  # fixed in transformers too
_MROPE_SECTION = [16, 24, 24]  # default of config.json


def norm(config: Qwen25VisionConfig, dtype: jnp.dtype) -> RMSNorm:
    """The norm of patches."""
    return RMSNorm(config.hidden_size, axis="embed", eps=_NORM_EPS, dtype=dtype)


class PatchEmbedding(nnx.Module):
    """The first layer of the tower; a module only for the checkpoint's names."""

    def __init__(self, config: QwenVisionConfig, dtype: jnp.dtype, *, bias: bool = False):
        side = config.patch_size
        shape = (config.hidden_size, config.in_channels, config.frames_per_patch, side, side)
        self.proj = PatchProjection(shape, bias=bias, stddev=config.initializer_range, dtype=dtype)

    def __call__(self, patches: jax.Array) -> jax.Array:
        return self.proj(patches)


class VisionMLP(nnx.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, config: Qwen25VisionConfig, dtype: jnp.dtype):
        size, inner = config.hidden_size, config.intermediate_size
        stddev = config.initializer_range
        self.activation = config.activation
        self.gate_proj = linear((inner, size), stddev=stddev, dtype=dtype)
        self.up_proj = linear((inner, size), stddev=stddev, dtype=dtype)
        self.down_proj = linear((size, inner), stddev=stddev, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = ACTIVATION_FUNCTIONS[self.activation](self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class VisionBlock(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual."""

    def __init__(self, config: Qwen25VisionConfig, dtype: jnp.dtype):
        size, stddev = config.hidden_size, config.initializer_range
        self.norm1 = norm(config, dtype)
        self.attn = RotaryAttention(size, config.num_heads, stddev=stddev, dtype=dtype)
        self.norm2 = norm(config, dtype)
        self.mlp = VisionMLP(config, dtype)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend
    ) -> jax.Array:
        x = x + self.attn(self.norm1(x), rotation, attend)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nnx.Module):
    """Joins neighbouring patches to one embedding of the decoder."""

    def __init__(self, config: Qwen25VisionConfig, dtype: jnp.dtype):
        size = config.hidden_size * config.patches_per_token
        stddev = config.initializer_range
        self.ln_q = norm(config, dtype)
        self.inner = linear((size, size), stddev=stddev, dtype=dtype)
        self.outer = linear((config.out_hidden_size, size), stddev=stddev, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[P, E] -> [P / patches_per_token, E of the decoder]"""
        joined = self.ln_q(x).reshape(-1, self.inner.weight.get_value().shape[1])
        return self.outer(ACTIVATION_FUNCTIONS["gelu"](self.inner(joined)))


class Qwen25VisionTower(nnx.Module):
    """The encoder of Qwen2.5-VL; its inputs are those of `Qwen25VisionConfig.encoder_inputs`."""

    def __init__(self, config: Qwen25VisionConfig, dtype: jnp.dtype):
        self.config = config
        self.patch_embed = PatchEmbedding(config, dtype)
        self.blocks = nnx.List([VisionBlock(config, dtype) for _ in range(config.depth)])
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
        config = self.config
        x = self.patch_embed(patches)
        rotation = axial_angles(places, theta=config.rope_theta, head_dim=config.head_dim)
        near = partial(attend_near, segments=windows, longest=config.window_patches)
        within = partial(attend_within, segments=frames)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, within if index in config.full_attention_layers else near)
        return self.merger(x)[order]


def qwen2_5_vl(config: ModelConfig) -> PictureLM:
    """A Qwen2.5-VL."""
    assert isinstance(config.vision, Qwen25VisionConfig)
    return PictureLM(config, Qwen25VisionTower(config.vision, config.dtype))


def qwen2_5_vl_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Qwen2_5_VLForConditionalGeneration. Raises ValueError for what is not supported."""
    text = hf.get_text_config()
    text.rope_parameters.setdefault("mrope_section", _MROPE_SECTION)
    vision = _vision_config(hf.vision_config)
    check_embeddings(vision.out_hidden_size, text)
    return decoder_config(
        text,
        dtype=dtype,
        max_model_len=max_model_len,
        architecture=(hf.architectures or ["?"])[0],
        qkv_bias=True,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        vision=vision,
    )


def _vision_config(hf: PretrainedConfig) -> Qwen25VisionConfig:
    check_tower(hf)
    return Qwen25VisionConfig(
        **shared_fields(hf),
        window_size=hf.window_size,
        full_attention_layers=tuple(hf.fullatt_block_indexes),
    )


def merger_names(config: ModelConfig) -> dict[str, Place]:
    """In checkpoints the two layers of the merger have numbers as names."""
    del config
    return {
        f"visual.merger.{ours}.{part}": Source(f"visual.merger.mlp.{theirs}.{part}")
        for ours, theirs in (("inner", 0), ("outer", 2))
        for part in ("weight", "bias")
    }
