"""SmolLM3, Seed-OSS and ERNIE 4.5: the shared decoder, with options that Llama does not have.

Knows transformers' names of these families' options; must not know checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.rope import NO_ROPE, interleaved

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def smollm3_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a SmolLM3ForCausalLM: layers with a 0 in `no_rope_layers` have no RoPE."""
    config = decoder_config(hf, dtype=dtype, max_model_len=max_model_len)
    rotates = hf.no_rope_layers
    if len(rotates) < config.num_layers:
        raise ValueError(
            f"no_rope_layers has {len(rotates)} entries for {config.num_layers} layers; correct config.json"
        )
    ropes = (rope if turns else NO_ROPE for rope, turns in zip(config.ropes, rotates, strict=False))
    return replace(config, ropes=tuple(ropes))


def seed_oss_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a SeedOssForCausalLM, whose output projection has its own bias option."""
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        output_bias=bool(hf.attention_out_bias),
    )


def ernie_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of an Ernie4_5ForCausalLM: one option for all biases; RoPE rotates adjacent pairs."""
    bias = bool(hf.use_bias)
    config = decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )
    return replace(config, ropes=interleaved(config.ropes))
