"""Granite 3: Llama with constant scales from the config.

The rest is the shared decoder. Knows transformers' names of Granite's options; must not know checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jaxpage.models.attention import Attention
from jaxpage.models.config import ExpertsConfig, ModelConfig, Scales, decoder_config
from jaxpage.models.decoder import CausalLM, DecoderLayer, Rotation
from jaxpage.models.layers import times

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GraniteLayer(DecoderLayer):
    """The outputs of attention and MLP are scaled (transformers' GraniteDecoderLayer)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        assert config.scales.residual is not None
        self.scale: float = config.scales.residual

    def __call__(
        self,
        x: jax.Array,
        rotation: Rotation,
        attention: Attention,
        is_token: jax.Array | None = None,
        load: list[jax.Array] | None = None,
    ) -> jax.Array:
        x = x + self._scaled(self.self_attn(self.input_layernorm(x), rotation, attention))
        return x + self._scaled(self.second_half(x, is_token, load))

    def _scaled(self, x: jax.Array) -> jax.Array:
        return times(x, self.scale)


def granite(config: ModelConfig) -> CausalLM:
    """A Granite 3 model."""
    return CausalLM(config, layer=GraniteLayer)


def granite_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
) -> ModelConfig:
    """ModelConfig of a GraniteForCausalLM."""
    scales = Scales(
        embedding=hf.embedding_multiplier,
        residual=hf.residual_multiplier,
        logits=1 / hf.logits_scaling,
    )
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        attention_scale=hf.attention_multiplier,
        scales=scales,
        **facts,
    )


def granite_moe_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a GraniteMoeForCausalLM."""
    experts = ExpertsConfig(
        layers=tuple(range(hf.num_hidden_layers)),
        num_experts=hf.num_local_experts,
        experts_per_token=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        shares_add_up_to_one=True,
    )
    return granite_config(hf, dtype=dtype, max_model_len=max_model_len, experts=experts)
