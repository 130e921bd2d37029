"""OLMo 2 and 3, EXAONE 4: norms after attention and MLP instead of before.

The rest is the shared decoder. Knows transformers' names of these families' options; must not know checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import MLP, CausalLM, Rotation, SelfAttention, hidden_norm
from jaxpage.models.layers import Norm, WideRMSNorm
from jaxpage.models.rope import only_with_window

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PostNormLayer(nnx.Module):
    """The outputs of attention and MLP are normed, their inputs are not (transformers' Olmo2DecoderLayer)."""

    def __init__(self, config: ModelConfig, index: int, *, norm: Norm):
        self.self_attn = SelfAttention(config, index, norm)
        self.post_attention_layernorm = hidden_norm(norm, config)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = hidden_norm(norm, config)

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        x = x + self.post_attention_layernorm(self.self_attn(x, rotation, attention))
        return x + self.post_feedforward_layernorm(self.mlp(x))


def post_norm(config: ModelConfig, *, norm: Norm) -> CausalLM:
    """A decoder of such layers; all its norms are `norm`s."""
    return CausalLM(config, layer=partial(PostNormLayer, norm=norm), norm=norm)


olmo = partial(post_norm, norm=WideRMSNorm)  # OLMo 2 and 3


def exaone4_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of an Exaone4ForCausalLM. If some layers have a window, the others have no positions."""
    config = decoder_config(hf, dtype=dtype, max_model_len=max_model_len, qk_norm=True)
    if hf.sliding_window is None:
        return config
    return replace(config, ropes=only_with_window(config.ropes, config.windows))
