"""Which families have checkpoints with an MTP layer, and how each has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxpage.models.config import ModelConfig
from jaxpage.models.eagle import FirstEagleHead
from jaxpage.models.mtp import mtp_config, mtp_experts, mtp_head, mtp_name
from jaxpage.models.qwen_mtp import qwen_mtp_config, qwen_mtp_head, qwen_mtp_name, qwen_mtp_places
from jaxpage.models.sources import Place


@dataclass(frozen=True, kw_only=True)
class MTPFamily:
    """As `registry.Family`, for MTP layers."""

    config: Callable[..., ModelConfig]  # (hf, target, *, tensors)
    head: Callable[[ModelConfig], FirstEagleHead]
    weight_map: Callable[[ModelConfig], dict[str, Place]]
    name: Callable[[ModelConfig, str], str | None]  # a tensor's, ours; None: it is not of the layer


_BEHIND_THE_LAST = MTPFamily(
    config=mtp_config, head=mtp_head, weight_map=mtp_experts, name=mtp_name
)
_QWEN = MTPFamily(
    config=qwen_mtp_config,
    head=qwen_mtp_head,
    weight_map=qwen_mtp_places,
    name=qwen_mtp_name,
)

_FAMILIES = {
    "DeepseekV3ForCausalLM": _BEHIND_THE_LAST,
    "Glm4MoeForCausalLM": _BEHIND_THE_LAST,
    "Glm4MoeLiteForCausalLM": _BEHIND_THE_LAST,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "Qwen3NextForCausalLM": _QWEN,
}


def mtp_family(model: ModelConfig) -> MTPFamily:
    """Of a model, or of its MTP layer. Raises ValueError for a family that has none."""
    if model.architecture not in _FAMILIES:
        raise ValueError(
            f'method "mtp" is for {", ".join(_FAMILIES)}, and the model is {model.architecture}'
        )
    return _FAMILIES[model.architecture]
