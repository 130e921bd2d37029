"""The supported architectures. A family that differs from another only in data is one entry without code.

Knows families; must not know devices, meshes or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.eagle_config import HEADS
from jaxpage.models.cohere import cohere, cohere2_config, cohere_config
from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM
from jaxpage.models.deepseek import (
    deepseek_v2_config,
    deepseek_v3_config,
    glm4_moe_lite_config,
)
from jaxpage.models.eagle import eagle_name
from jaxpage.models.eagle3 import eagle3_name
from jaxpage.models.falcon_h1 import (
    falcon_h1,
    falcon_h1_config,
    falcon_h1_parts,
)
from jaxpage.models.family import Family
from jaxpage.models.gemma import (
    gemma,
    gemma1,
    gemma1_config,
    gemma2_config,
    gemma3_config,
    gemma3_pictures_config,
    gemma3_text_config,
    gemma_with_pictures,
)
from jaxpage.models.gemma4 import (
    gemma4,
    gemma4_config,
    gemma4_pictures_config,
    gemma4_with_pictures,
)
from jaxpage.models.glm import glm4, glm_config
from jaxpage.models.gpt2 import GPT_2
from jaxpage.models.gpt_neox import GPT_NEOX
from jaxpage.models.gpt_oss import gpt_oss, gpt_oss_config
from jaxpage.models.granite import granite_config, granite_moe_config
from jaxpage.models.granite_hybrid import (
    granite_hybrid,
    granite_hybrid_config,
    granite_hybrid_parts,
)
from jaxpage.models.layers import RMSNorm
from jaxpage.models.lfm2 import lfm2, lfm2_config, lfm2_moe_config, lfm2_name, lfm2_parts
from jaxpage.models.llama_like import (
    ernie_config,
    ministral3_config,
    mistral3_config,
    seed_oss_config,
    smollm3_config,
)
from jaxpage.models.mixtures import (
    dots1_config,
    ernie_moe_config,
    glm4_moe_config,
    minimax_m2_config,
    mixtral_config,
    olmoe_config,
    qwen2_moe_config,
    qwen3_moe_config,
)
from jaxpage.models.mtp_families import mtp_family
from jaxpage.models.nemotron_h import (
    nemotron_h,
    nemotron_h_config,
    nemotron_h_name,
    nemotron_h_parts,
)
from jaxpage.models.olmo import exaone4_config, olmo, post_norm
from jaxpage.models.phi import PHI
from jaxpage.models.pixtral import mistral3_pictures_config, mistral3_with_pictures
from jaxpage.models.qwen2_5_vl import merger_names, qwen2_5_vl, qwen2_5_vl_config
from jaxpage.models.qwen3_5 import (
    fused_delta_nets,
    interleaved_delta_nets,
    qwen3_5,
    qwen3_5_config,
    qwen3_5_pictures_config,
    qwen3_5_with_pictures,
    qwen3_next_config,
)
from jaxpage.models.qwen3_vl import qwen3_vl, qwen3_vl_config, qwen3_vl_moe_config
from jaxpage.models.sources import (
    Naming,
    Place,
    ernie_experts,
    ernie_name,
    further_layer,
    further_predictors,
    fused_gate_up,
    fused_projections,
    gemma4_experts,
    gemma4_name,
    gpt_oss_experts,
    granite_experts,
    granite_name,
    minimax_experts,
    minimax_name,
    mixtral_experts,
    mtp_modules,
    separate_experts,
    shared_kv,
    text_and_pictures,
    text_part,
    turned_experts,
    with_visual,
)
from jaxpage.models.starcoder2 import nemotron, nemotron_config, starcoder2, starcoder2_config
from jaxpage.pictures.border import PictureProcessor
from jaxpage.pictures.gemma3 import gemma3_processor
from jaxpage.pictures.gemma4 import gemma4_processor
from jaxpage.pictures.pixtral import pixtral_processor
from jaxpage.pictures.qwen3_vl import qwen3_vl_processor
from jaxpage.pictures.qwen_vl import qwen2_5_vl_processor
from jaxpage.pictures.settings import read_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_GEMMA_4 = Family(
    config_from_hf=gemma4_config, module=gemma4, weight_map=gemma4_experts, is_idle=shared_kv
)

_LFM2 = Family(
    config_from_hf=lfm2_config, module=lfm2, weight_map=lfm2_parts, tensor_name=lfm2_name
)

_QWEN_3_5 = Family(
    config_from_hf=qwen3_5_config,
    module=qwen3_5,
    weight_map=fused_delta_nets,
    tensor_name=text_part,
    is_idle=further_predictors,
)
_QWEN_3_5_WITH_PICTURES = replace(
    _QWEN_3_5,
    config_from_hf=qwen3_5_pictures_config,
    module=qwen3_5_with_pictures,
    tensor_name=with_visual,
    processor=qwen3_vl_processor,
    text_only=_QWEN_3_5,
)

# Heads are no models of an engine, so their names are not in the registry.
_EAGLE, _EAGLE_3 = Family(tensor_name=eagle_name), Family(tensor_name=eagle3_name)

REGISTRY: dict[str, Family] = {
    "Cohere2ForCausalLM": Family(config_from_hf=cohere2_config, module=cohere),
    "CohereForCausalLM": Family(config_from_hf=cohere_config, module=cohere),
    "DeepseekV2ForCausalLM": Family(config_from_hf=deepseek_v2_config, weight_map=separate_experts),
    "DeepseekV3ForCausalLM": Family(
        config_from_hf=deepseek_v3_config, weight_map=separate_experts, is_idle=further_layer
    ),
    "Dots1ForCausalLM": Family(config_from_hf=dots1_config, weight_map=separate_experts),
    "Ernie4_5ForCausalLM": Family(config_from_hf=ernie_config),
    "Ernie4_5_MoeForCausalLM": Family(
        config_from_hf=ernie_moe_config,
        weight_map=ernie_experts,
        tensor_name=ernie_name,
        is_idle=mtp_modules,
    ),
    "Exaone4ForCausalLM": Family(
        config_from_hf=exaone4_config, module=partial(post_norm, norm=RMSNorm)
    ),
    "FalconH1ForCausalLM": Family(
        config_from_hf=falcon_h1_config, module=falcon_h1, weight_map=falcon_h1_parts
    ),
    "Gemma2ForCausalLM": Family(config_from_hf=gemma2_config, module=gemma),
    "Gemma3ForCausalLM": Family(config_from_hf=gemma3_config, module=gemma),
    "Gemma3ForConditionalGeneration": Family(
        config_from_hf=gemma3_pictures_config,
        module=gemma_with_pictures,
        tensor_name=text_and_pictures,
        processor=gemma3_processor,
        # Kernels support it, and trainers have no tower.
        text_only=Family(config_from_hf=gemma3_text_config, module=gemma, tensor_name=text_part),
    ),
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4ForConditionalGeneration": replace(
        _GEMMA_4,
        config_from_hf=gemma4_pictures_config,
        module=gemma4_with_pictures,
        tensor_name=gemma4_name,
        processor=gemma4_processor,
        text_only=replace(_GEMMA_4, tensor_name=text_part),
    ),
    "Gemma4UnifiedForCausalLM": _GEMMA_4,
    "Gemma4UnifiedForConditionalGeneration": replace(_GEMMA_4, tensor_name=text_part),
    "GemmaForCausalLM": Family(config_from_hf=gemma1_config, module=gemma1),
    "Glm4ForCausalLM": Family(config_from_hf=glm_config, module=glm4, weight_map=fused_gate_up),
    "Glm4MoeForCausalLM": Family(
        config_from_hf=glm4_moe_config, weight_map=separate_experts, is_idle=further_layer
    ),
    "Glm4MoeLiteForCausalLM": Family(
        config_from_hf=glm4_moe_lite_config, weight_map=separate_experts, is_idle=further_layer
    ),
    "GlmForCausalLM": Family(config_from_hf=glm_config, weight_map=fused_gate_up),
    "GPT2LMHeadModel": GPT_2,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "GptOssForCausalLM": Family(
        config_from_hf=gpt_oss_config, module=gpt_oss, weight_map=gpt_oss_experts
    ),
    "GraniteForCausalLM": Family(config_from_hf=granite_config),
    "GraniteMoeForCausalLM": Family(
        config_from_hf=granite_moe_config,
        weight_map=granite_experts,
        tensor_name=granite_name,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        config_from_hf=granite_hybrid_config,
        module=granite_hybrid,
        weight_map=granite_hybrid_parts,
        tensor_name=granite_name,
    ),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(_LFM2, config_from_hf=lfm2_moe_config),
    "LlamaForCausalLM": Family(),
    "MiniMaxM2ForCausalLM": Family(
        config_from_hf=minimax_m2_config,
        weight_map=minimax_experts,
        tensor_name=minimax_name,
        is_idle=further_layer,
    ),
    "Ministral3ForCausalLM": Family(config_from_hf=ministral3_config),
    "MinistralForCausalLM": Family(),
    "Mistral3ForConditionalGeneration": Family(
        config_from_hf=mistral3_pictures_config,
        module=mistral3_with_pictures,
        tensor_name=text_and_pictures,
        processor=pixtral_processor,
        text_only=Family(config_from_hf=mistral3_config, tensor_name=text_part),
    ),
    "MistralForCausalLM": Family(),
    "MixtralForCausalLM": Family(config_from_hf=mixtral_config, weight_map=mixtral_experts),
    "NemotronForCausalLM": Family(config_from_hf=nemotron_config, module=nemotron),
    "NemotronHForCausalLM": Family(
        config_from_hf=nemotron_h_config,
        module=nemotron_h,
        weight_map=nemotron_h_parts,
        tensor_name=nemotron_h_name,
        is_idle=further_predictors,
    ),
    **dict.fromkeys(
        ("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        Family(config_from_hf=partial(decoder_config, qk_norm="projection"), module=olmo),
    ),
    "OlmoeForCausalLM": Family(config_from_hf=olmoe_config, weight_map=separate_experts),
    "Phi3ForCausalLM": Family(weight_map=fused_projections),
    "PhiForCausalLM": PHI,
    "Qwen2_5_VLForConditionalGeneration": Family(
        config_from_hf=qwen2_5_vl_config,
        module=qwen2_5_vl,
        weight_map=merger_names,
        tensor_name=with_visual,
        processor=qwen2_5_vl_processor,
    ),
    "Qwen2ForCausalLM": Family(config_from_hf=partial(decoder_config, qkv_bias=True)),
    "Qwen2MoeForCausalLM": Family(config_from_hf=qwen2_moe_config, weight_map=separate_experts),
    "Qwen3ForCausalLM": Family(config_from_hf=partial(decoder_config, qk_norm=True)),
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN_3_5_WITH_PICTURES,
    "Qwen3_5MoeForCausalLM": _QWEN_3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_3_5_WITH_PICTURES,
    "Qwen3MoeForCausalLM": Family(config_from_hf=qwen3_moe_config, weight_map=separate_experts),
    "Qwen3NextForCausalLM": Family(
        config_from_hf=qwen3_next_config,
        module=qwen3_5,
        weight_map=interleaved_delta_nets,
        is_idle=further_predictors,
    ),
    "Qwen3VLForConditionalGeneration": Family(
        config_from_hf=qwen3_vl_config,
        module=qwen3_vl,
        tensor_name=with_visual,
        processor=qwen3_vl_processor,
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        config_from_hf=qwen3_vl_moe_config,
        module=qwen3_vl,
        weight_map=turned_experts,
        tensor_name=with_visual,
        processor=qwen3_vl_processor,
    ),
    "SeedOssForCausalLM": Family(config_from_hf=seed_oss_config),
    "SmolLM3ForCausalLM": Family(config_from_hf=smollm3_config),
    "Starcoder2ForCausalLM": Family(config_from_hf=starcoder2_config, module=starcoder2),
}


def family(hf_config: PretrainedConfig) -> Family:
    """The family of a config. Raises ValueError for an architecture that is not supported."""
    name = (hf_config.architectures or [f"none (model_type {hf_config.model_type!r})"])[0]
    if name in HEADS:
        raise ValueError(
            f"{name} is an EAGLE head, which only drafts for a model: give it as the model of speculative_config"
        )
    if name not in REGISTRY:
        supported = ", ".join(REGISTRY)
        raise ValueError(
            f"architecture {name} is not supported; supported are {supported}. Models that embed or classify "
            "texts are for LLM and jaxpage serve"
        )
    return REGISTRY[name]


def build(
    hf_config: PretrainedConfig,
    *,
    dtype: Any,
    max_model_len: int | None = None,
    pictures: bool = True,
) -> CausalLM:
    """The abstract model of a config: parameters are `jax.ShapeDtypeStruct`s of `dtype`, nothing is allocated.

    `pictures`: False omits the encoder, for families with a `Family.text_only`.

    `max_model_len` (default: the config's `max_position_embeddings`) determines the RoPE of some types, see `rope`.
    Load weights with `weights.load.load` or `weights.dummy.initialise`. Raises ValueError for what is not supported.
    """
    chosen = family(hf_config)
    if not getattr(hf_config.get_text_config(), "is_causal", True):
        raise ValueError(
            f"{(hf_config.architectures or ['?'])[0]}: is_causal is false in config.json, so tokens see those after "
            'them, and none can be generated; such models embed texts, with runner="pooling"'
        )
    if not pictures:
        chosen = chosen.text_only or chosen
    return chosen.module(chosen.config_from_hf(hf_config, dtype=dtype, max_model_len=max_model_len))


def weight_map(config: ModelConfig) -> dict[str, Place]:
    """Path -> place in the checkpoint, for parameters that are not a tensor with the same name."""
    return _family_of(config).weight_map(config)


def tensor_name(config: ModelConfig, name: str) -> str | None:
    """The family's name for a checkpoint's tensor; None if it is not used."""
    ours = _family_of(config).tensor_name(name)
    return None if ours is None or is_idle(config, name) else ours


def is_idle(config: ModelConfig, name: str) -> bool:
    """Whether a checkpoint's tensor is of a part of the text model that computes nothing."""
    ours = _family_of(config).tensor_name(name)
    return ours is not None and _family_of(config).is_idle(config, ours)


def naming_of(config: ModelConfig) -> Naming:
    """Both `weight_map` and `tensor_name` for one model."""
    return Naming(tensor_name=partial(tensor_name, config), weight_map=weight_map(config))


def _family_of(config: ModelConfig) -> Family:
    if config.eagle is not None:
        if config.eagle.mtp_layer is not None:
            layer = mtp_family(config)
            return Family(weight_map=layer.weight_map, tensor_name=partial(layer.name, config))
        return _EAGLE_3 if config.eagle.has_head else _EAGLE
    found = REGISTRY[config.architecture]
    return found.text_only or found if config.vision is None else found


def picture_processor(
    hf_config: PretrainedConfig,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
) -> PictureProcessor | None:
    """The processor for a checkpoint's pictures; None if its family takes none.

    folder: with the checkpoint's settings. `options` override these, under transformers' names (vLLM's
    `mm_processor_kwargs`). Raises ValueError for unsupported settings and options.
    """
    make = family(hf_config).processor
    if make is None:
        return None
    return make(hf_config, read_settings(folder), tokenizer=tokenizer, options=options)
