"""Gemma: norm weights with offset 1, scaled embeddings; Gemma 2 and 3: norms before and after each half of a layer.

The rest is the shared decoder. Knows transformers' names of Gemma's options; must not know checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig, Scales, activation_of, decoder_config
from jaxpage.models.decoder import (
    MLP,
    CausalLM,
    DecoderLayer,
    Rotation,
    SelfAttention,
    hidden_norm,
)
from jaxpage.models.layers import OffsetRMSNorm
from jaxpage.models.siglip import SiglipTower
from jaxpage.models.vision import PictureLM
from jaxpage.pictures.gemma3 import SiglipConfig, siglip_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GemmaLayer(nnx.Module):
    """A decoder layer with norms before and after attention and MLP ("sandwich" norms)."""

    def __init__(self, config: ModelConfig, index: int):
        self.input_layernorm = hidden_norm(OffsetRMSNorm, config)
        self.self_attn = SelfAttention(config, index, OffsetRMSNorm)
        self.post_attention_layernorm = hidden_norm(OffsetRMSNorm, config)
        self.pre_feedforward_layernorm = hidden_norm(OffsetRMSNorm, config)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = hidden_norm(OffsetRMSNorm, config)

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        attended = self.self_attn(self.input_layernorm(x), rotation, attention)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


def gemma1(config: ModelConfig) -> CausalLM:
    """A Gemma 1 model, with the layers of Llama."""
    return CausalLM(config, layer=partial(DecoderLayer, norm=OffsetRMSNorm), norm=OffsetRMSNorm)


def gemma(config: ModelConfig) -> CausalLM:
    """A Gemma 2 or 3 text model."""
    return CausalLM(config, layer=GemmaLayer, norm=OffsetRMSNorm)


def gemma_with_pictures(config: ModelConfig) -> PictureLM:
    """A Gemma 3 with its vision tower."""
    assert isinstance(config.vision, SiglipConfig)
    visual = SiglipTower(config.vision, config.dtype)
    return PictureLM(config, visual, layer=GemmaLayer, norm=OffsetRMSNorm)


def gemma1_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a GemmaForCausalLM. Released config.json say "gelu" and mean its approximation."""
    _check_causal(hf)
    activation = activation_of(hf, "GemmaForCausalLM")
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        activation="gelu_pytorch_tanh" if activation == "gelu" else activation,
        scales=Scales(embedding=hf.hidden_size**0.5),
    )


def gemma2_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Gemma2ForCausalLM."""
    cap = hf.attn_logit_softcapping
    return _gemma_config(hf, dtype, max_model_len, attention_soft_cap=cap)


def gemma3_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Gemma3ForCausalLM, which norms q and k instead of capping scores; transformers ignores a cap."""
    return _gemma_config(hf, dtype, max_model_len, qk_norm=True)


def gemma3_text_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
) -> ModelConfig:
    """ModelConfig of the text part of a Gemma3ForConditionalGeneration; transformers caps no logits there."""
    config = _gemma_config(
        hf.get_text_config(),
        dtype,
        max_model_len,
        architecture=(hf.architectures or ["?"])[0],
        qk_norm=True,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        **facts,
    )
    return replace(config, scales=replace(config.scales, logits_soft_cap=None))


def gemma3_pictures_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Gemma3ForConditionalGeneration."""
    activation_of(hf.vision_config, "the vision tower")
    vision = siglip_config(hf)
    return gemma3_text_config(hf, dtype=dtype, max_model_len=max_model_len, vision=vision)


def _gemma_config(
    hf: PretrainedConfig, dtype: Any, max_model_len: int | None, **facts: Any
) -> ModelConfig:
    _check_causal(hf)
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        attention_scale=hf.query_pre_attn_scalar**-0.5,
        scales=Scales(embedding=hf.hidden_size**0.5, logits_soft_cap=hf.final_logit_softcapping),
        **facts,
    )


def _check_causal(hf: PretrainedConfig) -> None:
    if getattr(hf, "use_bidirectional_attention", None):
        raise ValueError(
            "use_bidirectional_attention is set: an encoder cannot be decoded token by token; "
            "use a causal checkpoint"
        )
