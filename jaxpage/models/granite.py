"""Granite 3: the shared decoder with constant scales from the config.

Knows transformers' names of Granite's options; must not know checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxpage.models.config import ExpertsConfig, ModelConfig, Scales, decoder_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
