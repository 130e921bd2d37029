"""Mixtral, OLMoE, Qwen 2 and 3 with experts, GLM-4.5, dots.llm1, ERNIE 4.5, MiniMax-M2: their configs.

The rest is the shared decoder. Knows transformers' names of these families' options; must not know checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxpage.models.config import ExpertsConfig, ModelConfig, Routing, decoder_config
from jaxpage.models.llama_like import ernie_config
from jaxpage.models.rope import Rope, layer_ropes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def mixtral_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a MixtralForCausalLM."""
    experts = local_experts(hf)
    return decoder_config(hf, dtype=dtype, max_model_len=max_model_len, experts=experts)


def local_experts(hf: PretrainedConfig, **more: Any) -> ExpertsConfig:
    """Experts in every layer, under the names that Mixtral's options have. more: further fields."""
    return ExpertsConfig(
        layers=tuple(range(hf.num_hidden_layers)),
        num_experts=hf.num_local_experts,
        experts_per_token=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        shares_add_up_to_one=True,
        **more,
    )


def olmoe_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of an OlmoeForCausalLM."""
    if getattr(hf, "clip_qkv", None) is not None:
        raise ValueError(
            f"OlmoeForCausalLM with clip_qkv={hf.clip_qkv}: clipped queries, keys and values are not "
            "supported; released OLMoE models have none"
        )
    experts = ExpertsConfig(
        layers=tuple(range(hf.num_hidden_layers)),
        num_experts=hf.num_experts,
        experts_per_token=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        shares_add_up_to_one=bool(hf.norm_topk_prob),
    )
    return decoder_config(
        hf, dtype=dtype, max_model_len=max_model_len, experts=experts, qk_norm="projection"
    )


def qwen2_moe_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Qwen2MoeForCausalLM."""
    experts = qwen_experts(
        hf,
        shares_add_up_to_one=bool(hf.norm_topk_prob),
        shared_size=hf.shared_expert_intermediate_size,
    )
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        experts=experts,
        qkv_bias=bool(getattr(hf, "qkv_bias", True)),
    )


def qwen3_moe_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Qwen3MoeForCausalLM."""
    experts = qwen_experts(hf, shares_add_up_to_one=bool(hf.norm_topk_prob))
    return decoder_config(
        hf, dtype=dtype, max_model_len=max_model_len, experts=experts, qk_norm=True
    )


def qwen_experts(
    hf: PretrainedConfig, *, shares_add_up_to_one: bool, shared_size: int | None = None
) -> ExpertsConfig | None:
    """Every `decoder_sparse_step`th layer has experts, except those in `mlp_only_layers`; None if none has. Raises
    ValueError.
    """
    if hf.decoder_sparse_step < 1:
        raise ValueError(
            f"decoder_sparse_step is {hf.decoder_sparse_step} in config.json; it must be a positive number of layers"
        )
    layers = tuple(
        index
        for index in range(hf.num_hidden_layers)
        if hf.num_experts
        and (index + 1) % hf.decoder_sparse_step == 0
        and index not in (hf.mlp_only_layers or ())
    )
    if not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=hf.num_experts,
        experts_per_token=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        shares_add_up_to_one=shares_add_up_to_one,
        shared_size=shared_size,
    )


def glm4_moe_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Glm4MoeForCausalLM, whose output projection never has a bias."""
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        experts=grouped_experts(hf, first=hf.first_k_dense_replace),
        qk_norm=bool(hf.use_qk_norm),
        output_bias=False,
    )


def dots1_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Dots1ForCausalLM, with the experts of GLM-4.5."""
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        experts=grouped_experts(hf, first=hf.first_k_dense_replace),
        qk_norm=True,
    )


def ernie_moe_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of an Ernie4_5_MoeForCausalLM."""
    if hf.use_bias:
        raise ValueError(
            "Ernie4_5_MoeForCausalLM with use_bias: a bias of the head is not supported; released models have none"
        )
    first, last = hf.moe_layer_start_index, hf.moe_layer_end_index
    layers = tuple(
        index
        for index in range(first, min(last + 1, hf.num_hidden_layers))
        if (index + 1) % hf.moe_layer_interval == 0
    )
    experts = ExpertsConfig(
        layers=layers,
        num_experts=hf.moe_num_experts,
        experts_per_token=hf.moe_k,
        intermediate_size=hf.moe_intermediate_size,
        shares_add_up_to_one=True,
        shared_size=hf.moe_intermediate_size * hf.moe_num_shared_experts or None,
        shared_gate=False,
        routing=Routing(
            has_correction=True, correction_axes=2, least_sum=hf.moe_norm_min, in_float32=True
        ),
    )
    more = {"experts": experts} if layers else {}
    return ernie_config(hf, dtype=dtype, max_model_len=max_model_len, **more)


def minimax_m2_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a MiniMaxM2ForCausalLM."""
    # The weights of routers are float32 in checkpoints.
    routing = Routing(scores="sigmoid", has_correction=True, in_float32=True)
    config = decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        experts=local_experts(hf, routing=routing),
        qk_norm="projection",
        qkv_bias=False,
        output_bias=False,
    )
    return replace(config, ropes=_partial_ropes(hf, config))


def _partial_ropes(hf: PretrainedConfig, config: ModelConfig) -> tuple[Rope, ...]:
    """Of `rotary_dim` dimensions: transformers makes it a `partial_rotary_factor`, missing in its defaults."""
    factor = hf.rope_parameters.get("partial_rotary_factor", 1.0)
    rotated = int(config.head_dim * factor)
    if not 2 <= rotated <= config.head_dim:
        raise ValueError(
            f"{config.architecture}: RoPE would rotate {rotated} of {config.head_dim} dimensions of a head; check "
            "rotary_dim and head_dim in config.json"
        )
    kinds = ["full_attention"] * config.num_layers
    return layer_ropes(hf, kinds, head_dim=rotated, max_model_len=config.max_model_len)


def grouped_experts(
    hf: PretrainedConfig, *, first: int, routing: Routing | None = None
) -> ExpertsConfig | None:
    """Layers from `first` on have experts. routing: by default that of transformers' Glm4MoeTopkRouter."""
    layers = tuple(range(max(first, 0), hf.num_hidden_layers))
    if not layers:
        return None
    if routing is None:
        routing = Routing(
            scores="sigmoid",
            has_correction=True,
            num_groups=hf.n_group or 1,
            chosen_groups=hf.topk_group or 1,
            factor=hf.routed_scaling_factor,
            in_float32=True,
        )
    return ExpertsConfig(
        layers=layers,
        num_experts=hf.n_routed_experts,
        experts_per_token=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        shares_add_up_to_one=bool(hf.norm_topk_prob),
        shared_size=hf.moe_intermediate_size * (hf.n_shared_experts or 0) or None,
        shared_gate=False,
        routing=routing,
    )
