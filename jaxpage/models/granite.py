"""Granite 3: the shared decoder with constant scales from the config.

Knows transformers' names of Granite's options; must not know checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxpage.models.config import ModelConfig, Scales, decoder_config
from jaxpage.models.mixtures import local_experts

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
    experts = local_experts(hf)
    return granite_config(hf, dtype=dtype, max_model_len=max_model_len, experts=experts)
