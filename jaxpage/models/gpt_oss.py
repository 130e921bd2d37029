"""gpt-oss: attention with sinks, experts with biases and a clamped SwiGLU.

The rest is the shared decoder. Knows transformers' names of gpt-oss's options; must not know checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax import nnx

from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM, DecoderLayer, SelfAttention
from jaxpage.models.layers import Normal, param
from jaxpage.models.mixtures import local_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def gpt_oss(config: ModelConfig) -> CausalLM:
    """A gpt-oss model."""
    return CausalLM(config, layer=_layer)


def _layer(config: ModelConfig, index: int) -> DecoderLayer:
    """A decoder layer with an attention sink for each query head."""
    layer = DecoderLayer(config, index)
    init, dtype = Normal(config.initializer_range), config.dtype
    sinks = param((config.num_heads,), axes=("heads",), init=init, dtype=dtype)
    assert isinstance(layer.self_attn, SelfAttention)
    layer.self_attn.sinks = nnx.data(sinks)
    return layer


def gpt_oss_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a GptOssForCausalLM."""
    experts = local_experts(
        hf,
        bias=True,
        swiglu_limit=float(getattr(hf, "swiglu_limit", 7.0)),
        swiglu_slope=float(getattr(hf, "swiglu_alpha", 1.702)),
    )
    return decoder_config(hf, dtype=dtype, max_model_len=max_model_len, experts=experts)
