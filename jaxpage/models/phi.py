"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one LayerNorm, and a head with a bias.

The rest is the shared decoder. Knows transformers' names of Phi's options and tensors; must not know files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM, Rotation, SelfAttention, hidden_norm
from jaxpage.models.family import Family
from jaxpage.models.layers import LayerNorm, Linear, Normal
from jaxpage.models.sources import Place, Source
from jaxpage.models.starcoder2 import PlainMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PhiLayer(nnx.Module):
    """transformers' PhiDecoderLayer."""

    def __init__(self, config: ModelConfig, index: int):
        self.input_layernorm = hidden_norm(LayerNorm, config)
        self.self_attn = SelfAttention(config, index, LayerNorm)
        self.mlp = PlainMLP(config, ("up_proj", "down_proj"))

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        normed = self.input_layernorm(x)
        return self.self_attn(normed, rotation, attention) + self.mlp(normed) + x


def _model(config: ModelConfig) -> CausalLM:
    model = CausalLM(config, layer=PhiLayer, norm=LayerNorm)
    head = Linear(
        (config.vocab_size, config.hidden_size),
        axes=("vocab", "embed"),
        bias=True,
        init=Normal(config.initializer_range),
        dtype=config.dtype,
    )
    model.lm_head = nnx.data(head)
    return model


def _config(hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None) -> ModelConfig:
    """ModelConfig of a PhiForCausalLM. All its linear layers have biases."""
    if hf.tie_word_embeddings:
        raise ValueError(
            "PhiForCausalLM with tie_word_embeddings is not supported: the head has a bias of its own; use a "
            "checkpoint with a head, as all released ones"
        )
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        norm_eps=hf.layer_norm_eps,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=bool(hf.qk_layernorm),
    )


# Ours -> theirs.
_NAMES = {
    "self_attn.o_proj": "self_attn.dense",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}


def _parts(config: ModelConfig) -> dict[str, Place]:
    """Phi has its own names."""
    names = {"model.norm": "model.final_layernorm"} | {
        f"model.layers.{i}.{ours}": f"model.layers.{i}.{theirs}"
        for i in range(config.num_layers)
        for ours, theirs in _NAMES.items()
    }
    return {
        f"{ours}.{kind}": Source(f"{theirs}.{kind}")
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }


PHI = Family(config_from_hf=_config, module=_model, weight_map=_parts)
