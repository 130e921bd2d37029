"""StarCoder 2: LayerNorm with bias, and an MLP without a gate.

The rest is the shared decoder. Knows transformers' names of StarCoder's options; must not know checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM, Rotation, SelfAttention, hidden_norm
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, LayerNorm, Linear, Normal

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PlainMLP(nnx.Module):
    """c_proj(activation(c_fc(x))) (transformers' Starcoder2MLP)."""

    def __init__(self, config: ModelConfig):
        self.activation = config.activation
        embed, inner = config.hidden_size, config.intermediate_size

        def projection(shape: tuple[int, int], axes: tuple[str, str]) -> Linear:
            init = Normal(config.initializer_range)
            return Linear(shape, axes=axes, bias=config.mlp_bias, init=init, dtype=config.dtype)

        self.c_fc = projection((inner, embed), ("mlp", "embed"))
        self.c_proj = projection((embed, inner), ("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(ACTIVATION_FUNCTIONS[self.activation](self.c_fc(x)))


class Starcoder2Layer(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual (transformers' Starcoder2DecoderLayer)."""

    def __init__(self, config: ModelConfig, index: int):
        self.input_layernorm = hidden_norm(LayerNorm, config)
        self.self_attn = SelfAttention(config, index, LayerNorm)
        self.post_attention_layernorm = hidden_norm(LayerNorm, config)
        self.mlp = PlainMLP(config)

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


def starcoder2(config: ModelConfig) -> CausalLM:
    """A StarCoder 2 model."""
    return CausalLM(config, layer=Starcoder2Layer, norm=LayerNorm)


def starcoder2_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Starcoder2ForCausalLM, which has one option for all biases of linear layers."""
    bias = bool(hf.use_bias)
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        norm_eps=hf.norm_epsilon,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )
