"""Granite 4: most layers are Mamba-2, the others attention, all with Granite's constant scales.

Some models have attention in all layers. Knows transformers' names of the options, and where checkpoints have the
parameters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.granite import granite_config
from jaxpage.models.hybrid import HybridLayer
from jaxpage.models.mamba2 import Mamba2, mamba_parts, recurrent_layers, time_step_limits
from jaxpage.models.mixtures import local_experts
from jaxpage.models.recurrent_config import MambaOptions
from jaxpage.models.rope import NO_ROPE
from jaxpage.models.sources import Place, Source, granite_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RECURRENT, _FULL = "linear_attention", "full_attention"
_COUNTS = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv")


def granite_hybrid(config: ModelConfig) -> CausalLM:
    """A Granite 4 model."""
    return CausalLM(config, layer=partial(HybridLayer, name="mamba", part=Mamba2))


def granite_hybrid_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a GraniteMoeHybridForCausalLM. Raises ValueError for what is not supported."""
    config = granite_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        intermediate_size=hf.shared_intermediate_size,
        **_experts(hf),
        **_recurrent(hf),
    )
    if hf.position_embedding_type == "rope":
        return config
    return replace(config, ropes=(NO_ROPE,) * config.num_layers)


def _experts(hf: PretrainedConfig) -> dict[str, Any]:
    if not hf.num_local_experts:
        return {}
    size = hf.shared_intermediate_size
    return {"experts": local_experts(hf, shared_size=size, shared_gate=False)}


def _recurrent(hf: PretrainedConfig) -> dict[str, Any]:
    owner, kinds = "GraniteMoeHybridForCausalLM", hf.layer_types
    unknown = sorted(set(kinds) - {_RECURRENT, _FULL})
    if unknown or len(kinds) != hf.num_hidden_layers or _FULL not in kinds:
        raise ValueError(
            f"{owner}: layer_types must have {_RECURRENT} or {_FULL} for each of "
            f"{hf.num_hidden_layers} layers, and at least one {_FULL}; config.json has {', '.join(kinds)}"
        )
    if _RECURRENT not in kinds:
        return {}
    if hf.hidden_act != "silu":
        raise ValueError(f"{owner}: hidden_act is {hf.hidden_act!r}; supported is 'silu'")
    sizes = recurrent_layers(
        hf,
        _COUNTS,
        owner,
        layers=tuple(index for index, kind in enumerate(kinds) if kind == _RECURRENT),
        options=MambaOptions(
            projection_bias=bool(hf.mamba_proj_bias),
            convolution_bias=bool(hf.mamba_conv_bias),
            time_steps=time_step_limits(hf, owner),
        ),
    )
    return {"recurrent": sizes}


def granite_hybrid_parts(config: ModelConfig) -> dict[str, Place]:
    """Granite 4: all parts of Mamba-2's projection in one tensor, and gate and up in one, of the MLP that stands beside
    experts or alone.
    """
    places: dict[str, Place] = {} if config.experts is None else granite_experts(config)
    for i in range(config.num_layers):
        layer, module, size = f"model.layers.{i}", "mlp", config.intermediate_size
        if config.experts is not None:
            module = "mlp.shared_experts"
        rows = {"gate_proj": (0, size), "up_proj": (size, 2 * size)}
        for part, (start, stop) in rows.items():
            place = Source(f"{layer}.shared_mlp.input_linear.weight", start, stop)
            places[f"{layer}.{module}.{part}.weight"] = place
        places[f"{layer}.{module}.down_proj.weight"] = Source(
            f"{layer}.shared_mlp.output_linear.weight"
        )
    for i in () if config.recurrent is None else config.recurrent.layers:
        layer = f"model.layers.{i}.mamba"
        places |= mamba_parts(config, layer, layer)
    return places
