"""Qwen3-VL: a vision tower whose intermediate layers are also added to the first layers of Qwen3's decoder.

Attribute paths are the checkpoint's names. Knows transformers' names of the options.

Letters: P patches, E dim of the tower.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, Embedding, Normal
from jaxpage.models.mixtures import qwen_experts
from jaxpage.models.qwen2_5_vl import PatchEmbedding
from jaxpage.models.vision import (
    Attend,
    LayerNorm,
    PictureLM,
    RotaryAttention,
    attend_within,
    axial_angles,
    check_embeddings,
    check_tower,
    linear,
)
from jaxpage.pictures.qwen_vision import Qwen3VisionConfig, shared_fields

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NORM_EPS = 1e-6  # fixed in transformers too
_MROPE = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}  # default of config.json


class VisionMLP(nnx.Module):
    """fc2(activation(fc1(x)))"""

    def __init__(self, config: Qwen3VisionConfig, dtype: jnp.dtype):
        size, inner, stddev = config.hidden_size, config.intermediate_size, config.initializer_range
        self.activation = config.activation
        self.linear_fc1 = linear((inner, size), stddev=stddev, dtype=dtype)
        self.linear_fc2 = linear((size, inner), stddev=stddev, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_fc2(ACTIVATION_FUNCTIONS[self.activation](self.linear_fc1(x)))


class VisionBlock(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual."""

    def __init__(self, config: Qwen3VisionConfig, dtype: jnp.dtype):
        size, stddev = config.hidden_size, config.initializer_range
        self.norm1 = LayerNorm(size, eps=_NORM_EPS, dtype=dtype)
        self.attn = RotaryAttention(size, config.num_heads, stddev=stddev, dtype=dtype)
        self.norm2 = LayerNorm(size, eps=_NORM_EPS, dtype=dtype)
        self.mlp = VisionMLP(config, dtype)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend
    ) -> jax.Array:
        x = x + self.attn(self.norm1(x), rotation, attend)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nnx.Module):
    """Joins neighbouring patches to E values of the decoder, with a norm before or after joining."""

    def __init__(self, config: Qwen3VisionConfig, dtype: jnp.dtype, *, norm_joined: bool):
        size = config.hidden_size * config.patches_per_token
        stddev, self.norm_joined = config.initializer_range, norm_joined
        norm_size = size if norm_joined else config.hidden_size
        self.norm = LayerNorm(norm_size, eps=_NORM_EPS, dtype=dtype)
        self.linear_fc1 = linear((size, size), stddev=stddev, dtype=dtype)
        self.linear_fc2 = linear((config.out_hidden_size, size), stddev=stddev, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[P, E] -> [P / patches_per_token, E of the decoder]"""
        size = self.linear_fc1.weight.get_value().shape[1]
        joined = (
            self.norm(x.reshape(-1, size)) if self.norm_joined else self.norm(x).reshape(-1, size)
        )
        return self.linear_fc2(ACTIVATION_FUNCTIONS["gelu"](self.linear_fc1(joined)))


class Qwen3VisionTower(nnx.Module):
    """The encoder of Qwen3-VL; its inputs are those of `Qwen3VisionConfig.encoder_inputs`."""

    def __init__(self, config: Qwen3VisionConfig, dtype: jnp.dtype):
        self.config = config
        init = Normal(config.initializer_range)
        self.patch_embed = PatchEmbedding(config, dtype, bias=True)
        self.pos_embed = Embedding(config.table_side**2, config.hidden_size, init=init, dtype=dtype)
        self.blocks = nnx.List([VisionBlock(config, dtype) for _ in range(config.depth)])
        self.merger = PatchMerger(config, dtype, norm_joined=False)
        self.deepstack_merger_list = nnx.List(
            [PatchMerger(config, dtype, norm_joined=True) for _ in config.deep_layers]
        )

    def __call__(
        self,
        *,
        patches: jax.Array,
        places: jax.Array,
        frames: jax.Array,
        corners: jax.Array,
        shares: jax.Array,
    ) -> jax.Array:
        config = self.config
        x = self.patch_embed(patches)
        learned = self.pos_embed(corners).astype(jnp.float32) * shares[..., None]
        x += learned.sum(axis=1).astype(x.dtype)
        rotation = axial_angles(places, theta=config.rope_theta, head_dim=config.head_dim)
        deep: list[jax.Array] = []
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, partial(attend_within, segments=frames))
            if index in config.deep_layers:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return jnp.concatenate([self.merger(x), *deep], axis=-1)


def qwen3_vl(config: ModelConfig) -> PictureLM:
    """A Qwen3-VL."""
    assert isinstance(config.vision, Qwen3VisionConfig)
    return PictureLM(config, Qwen3VisionTower(config.vision, config.dtype))


def qwen3_vl_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
) -> ModelConfig:
    """ModelConfig of a Qwen3VLForConditionalGeneration. Raises ValueError for what is not supported."""
    text, vision = hf.get_text_config(), tower_config(hf.vision_config)
    for name, value in _MROPE.items():
        text.rope_parameters.setdefault(name, value)
    check_embeddings(vision.out_hidden_size, text)
    return decoder_config(
        text,
        dtype=dtype,
        max_model_len=max_model_len,
        architecture=(hf.architectures or ["?"])[0],
        qk_norm=True,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        vision=vision,
        **facts,
    )


def qwen3_vl_moe_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Qwen3VLMoeForConditionalGeneration, whose shares always add up to one."""
    experts = qwen_experts(hf.get_text_config(), shares_add_up_to_one=True)
    return qwen3_vl_config(hf, dtype=dtype, max_model_len=max_model_len, experts=experts)


def tower_config(hf: PretrainedConfig) -> Qwen3VisionConfig:
    """Of a vision config; Qwen3.5's has no `deepstack_visual_indexes`. Raises ValueError."""
    check_tower(hf)
    layers = tuple(getattr(hf, "deepstack_visual_indexes", None) or ())
    if list(layers) != sorted(set(layers)) or any(not 0 <= layer < hf.depth for layer in layers):
        raise ValueError(
            f"deepstack_visual_indexes {list(layers)} must ascend within the {hf.depth} layers of the vision tower; "
            "correct config.json"
        )
    return Qwen3VisionConfig(
        **shared_fields(hf),
        table_side=int(hf.num_position_embeddings**0.5),
        deep_layers=layers,
    )
