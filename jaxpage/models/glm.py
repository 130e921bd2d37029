"""GLM-4: RoPE rotates adjacent pairs in a part of the head; Glm4 has norms before and after each half of a layer.

The rest is the shared decoder. Knows transformers' names of GLM's options; must not know checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM, DecoderLayer, Rotation, hidden_norm
from jaxpage.models.layers import RMSNorm
from jaxpage.models.rope import interleaved

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Glm4Layer(DecoderLayer):
    """The outputs of attention and MLP are normed too (transformers' Glm4DecoderLayer)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.post_self_attn_layernorm = hidden_norm(RMSNorm, config)
        self.post_mlp_layernorm = hidden_norm(RMSNorm, config)

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        attended = self.self_attn(self.input_layernorm(x), rotation, attention)
        x = x + self.post_self_attn_layernorm(attended)
        return x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))


def glm4(config: ModelConfig) -> CausalLM:
    """A model of Glm4ForCausalLM."""
    return CausalLM(config, layer=Glm4Layer)


def glm_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a GlmForCausalLM or Glm4ForCausalLM, whose output projection never has a bias."""
    config = decoder_config(hf, dtype=dtype, max_model_len=max_model_len, output_bias=False)
    return replace(config, ropes=interleaved(config.ropes))
