"""SmolLM3, Seed-OSS, ERNIE 4.5, Ministral 3: the shared decoder, with options that Llama does not have.

Knows transformers' names of these families' options; must not know checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.rope import NO_ROPE, interleaved, scaled_queries

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
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
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
        **facts,
    )
    return replace(config, ropes=interleaved(config.ropes))


def ministral3_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
) -> ModelConfig:
    """ModelConfig of a Ministral3ForCausalLM, whose queries are scaled by their position."""
    config = decoder_config(hf, dtype=dtype, max_model_len=max_model_len, **facts)
    return replace(config, ropes=scaled_queries(config.ropes, hf.rope_parameters))


_TEXT_CONFIGS = {"mistral": decoder_config, "ministral3": ministral3_config}


def mistral3_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
) -> ModelConfig:
    """ModelConfig of the text part of a Mistral3ForConditionalGeneration: Mistral Small 3.1 and 3.2, Ministral 3.

    Whether embeddings are tied is in the config of the text part: transformers' own option is true by default, and
    ignored for checkpoints that have a head.
    """
    text, architecture = hf.get_text_config(), (hf.architectures or ["?"])[0]
    if text.model_type not in _TEXT_CONFIGS:
        known = ", ".join(_TEXT_CONFIGS)
        raise ValueError(
            f"{architecture} with a text_config of model_type {text.model_type!r}; supported are {known}"
        )
    make = _TEXT_CONFIGS[text.model_type]
    return make(text, dtype=dtype, max_model_len=max_model_len, architecture=architecture, **facts)
