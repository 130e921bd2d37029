"""DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash: their configs, with multi-head latent attention.

The rest is the shared decoder. Knows transformers' names of these families' options; must not know checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxpage.models.config import ExpertsConfig, LatentSizes, ModelConfig, Routing, decoder_config
from jaxpage.models.mixtures import grouped_experts
from jaxpage.models.rope import interleaved, yarn_scale

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def deepseek_v2_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a DeepseekV2ForCausalLM."""
    return _latent_config(hf, _experts_v2(hf), dtype=dtype, max_model_len=max_model_len)


def deepseek_v3_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a DeepseekV3ForCausalLM: DeepSeek-V3, V3.1 and R1, Kimi-K2."""
    _check_frequency(hf)
    experts = grouped_experts(hf, first=hf.first_k_dense_replace or 0)
    return _latent_config(hf, experts, dtype=dtype, max_model_len=max_model_len)


def glm4_moe_lite_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Glm4MoeLiteForCausalLM: its first layers have an MLP, all others experts."""
    kinds = list(hf.mlp_layer_types)
    num_layers = hf.num_hidden_layers
    first = kinds.index("sparse") if "sparse" in kinds else num_layers
    if kinds != ["dense"] * first + ["sparse"] * (num_layers - first):
        raise ValueError(
            f"{_name(hf)}: mlp_layer_types must be 'dense' for the first of {num_layers} layers and 'sparse' for the "
            f"others; config.json has {', '.join(map(str, kinds))}"
        )
    experts = grouped_experts(hf, first=first)
    config = _latent_config(hf, experts, dtype=dtype, max_model_len=max_model_len)
    part = hf.rope_parameters.get("partial_rotary_factor", 1.0)
    if part != 1:
        raise ValueError(
            f"{_name(hf)}: partial_rotary_factor is {part} in config.json, and transformers' model needs 1: "
            "qk_rope_head_dim is the part of a head that is rotated"
        )
    return config


def _latent_config(
    hf: PretrainedConfig,
    experts: ExpertsConfig | None,
    *,
    dtype: Any,
    max_model_len: int | None,
) -> ModelConfig:
    rank, plain, rotated, values = sizes = [getattr(hf, name) for name in _SIZES]
    query_rank = hf.q_lora_rank
    named: list[tuple[str, Any]] = [*zip(_SIZES, sizes, strict=True)]
    if query_rank is not None:
        named.append(("q_lora_rank", query_rank))
    for name, size in named:
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"{_name(hf)}: {name} is {size!r} in config.json; it must be a positive integer"
            )
    if hf.head_dim != rotated:  # transformers rotates as many dimensions
        raise ValueError(
            f"{_name(hf)}: head_dim is {hf.head_dim!r} in config.json; leave it out, or give that of qk_rope_head_dim, "
            f"{rotated}"
        )
    config = decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        experts=experts,
        num_kv_heads=1,
        head_dim=rank + rotated,
        latent=LatentSizes(
            query_rank=query_rank,
            rank=rank,
            plain_dim=plain,
            rotated_dim=rotated,
            value_dim=values,
        ),
    )
    turns_neighbours = getattr(hf, "rope_interleave", True)  # DeepSeek-V2 has no such option
    return replace(
        config,
        ropes=interleaved(config.ropes) if turns_neighbours else config.ropes,
        attention_scale=_attention_scale(hf, plain + rotated),
    )


def _attention_scale(hf: PretrainedConfig, head_dim: int) -> float:
    """transformers' yarn_apply_mscale: queries and keys each grow with the length that YaRN extends."""
    parameters = hf.rope_parameters
    factor, weight = (parameters.get(name) for name in ("factor", "mscale_all_dim"))
    if parameters.get("rope_type", "default") == "default" or not weight:
        return head_dim**-0.5
    if not isinstance(weight, int | float) or not isinstance(factor, int | float) or not factor:
        raise ValueError(
            f"{_name(hf)}: mscale_all_dim is {weight!r} and factor {factor!r} in rope_parameters; both must be numbers"
        )
    return head_dim**-0.5 * yarn_scale(factor, weight) ** 2


def _experts_v2(hf: PretrainedConfig) -> ExpertsConfig | None:
    """Layers from `first_k_dense_replace` on have experts, with the router of transformers' DeepseekV2TopkRouter."""
    _check_frequency(hf)
    if hf.norm_topk_prob:
        raise ValueError(
            f"{_name(hf)}: norm_topk_prob is true in config.json, and transformers does not add shares up to one here; "
            "released models have false"
        )
    if hf.topk_method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"{_name(hf)}: topk_method is {hf.topk_method!r} in config.json; supported are 'greedy' and "
            "'group_limited_greedy'"
        )
    has_groups = hf.topk_method == "group_limited_greedy"
    routing = Routing(
        num_groups=(hf.n_group or 1) if has_groups else 1,
        chosen_groups=(hf.topk_group or 1) if has_groups else 1,
        num_best=1,
        factor=hf.routed_scaling_factor,
        in_float32=True,
    )
    return grouped_experts(hf, first=hf.first_k_dense_replace, routing=routing)


def _check_frequency(hf: PretrainedConfig) -> None:
    frequency = getattr(hf, "moe_layer_freq", 1)
    if frequency != 1:
        raise ValueError(
            f"{_name(hf)}: moe_layer_freq is {frequency!r} in config.json, and transformers has experts in every layer "
            "after the first ones; released models have 1"
        )


def _name(hf: PretrainedConfig) -> str:
    return (hf.architectures or ["?"])[0]
