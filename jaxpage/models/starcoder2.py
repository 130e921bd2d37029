"""StarCoder 2 and Nemotron: LayerNorm with bias, and an MLP without a gate.

The rest is the shared decoder. Knows transformers' names of their options; must not know checkpoints.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM, Rotation, SelfAttention, hidden_norm
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, LayerNorm, Linear, Norm, Normal

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PlainMLP(nnx.Module):
    """down(activation(up(x))), with the family's names of the two layers (transformers' Starcoder2MLP)."""

    def __init__(self, config: ModelConfig, names: tuple[str, str], inner: int | None = None):
        """inner: the MLP dim, if it is not the config's."""
        self.activation, self.names = config.activation, names
        embed = config.hidden_size
        inner = config.intermediate_size if inner is None else inner

        def projection(shape: tuple[int, int], axes: tuple[str, str]) -> Linear:
            init = Normal(config.initializer_range)
            return Linear(shape, axes=axes, bias=config.mlp_bias, init=init, dtype=config.dtype)

        up, down = names
        setattr(self, up, projection((inner, embed), ("mlp", "embed")))
        setattr(self, down, projection((embed, inner), ("embed", "mlp")))

    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = (getattr(self, name) for name in self.names)
        return down(ACTIVATION_FUNCTIONS[self.activation](up(x)))


class PlainLayer(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual (transformers' Starcoder2DecoderLayer)."""

    def __init__(self, config: ModelConfig, index: int, *, norm: Norm, names: tuple[str, str]):
        self.input_layernorm = hidden_norm(norm, config)
        self.self_attn = SelfAttention(config, index, norm)
        self.post_attention_layernorm = hidden_norm(norm, config)
        self.mlp = PlainMLP(config, names)

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


def _plain(config: ModelConfig, *, norm: Norm, names: tuple[str, str]) -> CausalLM:
    return CausalLM(config, layer=partial(PlainLayer, norm=norm, names=names), norm=norm)


starcoder2 = partial(_plain, norm=LayerNorm, names=("c_fc", "c_proj"))
nemotron = partial(_plain, norm=partial(LayerNorm, offset=1), names=("up_proj", "down_proj"))


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


def nemotron_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a NemotronForCausalLM."""
    return decoder_config(hf, dtype=dtype, max_model_len=max_model_len, norm_eps=hf.norm_eps)
