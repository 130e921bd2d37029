"""Command R (Cohere) and Command R7B (Cohere 2): attention and MLP in parallel, after one LayerNorm.

The rest is the shared decoder. Knows transformers' names of Cohere's options; must not know checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig, Scales, decoder_config
from jaxpage.models.decoder import MLP, CausalLM, Rotation, SelfAttention, hidden_norm
from jaxpage.models.layers import LayerNorm
from jaxpage.models.rope import interleaved, only_with_window

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NORM = partial(LayerNorm, bias=False)  # transformers' CohereLayerNorm


class ParallelLayer(nnx.Module):
    """Attention and MLP read the same normed input (transformers' CohereDecoderLayer)."""

    def __init__(self, config: ModelConfig, index: int):
        self.input_layernorm = hidden_norm(_NORM, config)
        self.self_attn = SelfAttention(config, index, _NORM)
        self.mlp = MLP(config)

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        normed = self.input_layernorm(x)
        return x + self.self_attn(normed, rotation, attention) + self.mlp(normed)


def cohere(config: ModelConfig) -> CausalLM:
    """A Cohere or Cohere 2 model."""
    return CausalLM(config, layer=ParallelLayer, norm=_NORM)


def cohere_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a CohereForCausalLM or Cohere2ForCausalLM."""
    if getattr(hf, "use_qk_norm", False):
        raise ValueError(
            "CohereForCausalLM with use_qk_norm: norms of queries and keys with weights of their own for each head are "
            "not supported; use a checkpoint without, such as Command R of August 2024"
        )
    config = decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        norm_eps=hf.layer_norm_eps,
        scales=Scales(logits=hf.logit_scale),
    )
    return replace(config, ropes=interleaved(config.ropes))


def cohere2_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Cohere2ForCausalLM, whose layers without a window have no positions."""
    config = cohere_config(hf, dtype=dtype, max_model_len=max_model_len)
    return replace(config, ropes=only_with_window(config.ropes, config.windows))
