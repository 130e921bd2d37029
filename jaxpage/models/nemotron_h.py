"""Nemotron-H: each layer has Mamba-2, attention without RoPE, an MLP or experts alone, after a norm, with a residual.

Neither MLPs nor experts have gates (https://arxiv.org/abs/2504.03624; with experts: Nemotron 3). Knows transformers'
names of the options, and where checkpoints have the parameters.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import jax
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import ExpertsConfig, ModelConfig, Routing, decoder_config
from jaxpage.models.decoder import CausalLM, SelfAttention, hidden_norm
from jaxpage.models.experts import MixtureOfExperts
from jaxpage.models.layers import WideRMSNorm
from jaxpage.models.mamba2 import Mamba2, mamba_parts, recurrent_layers, time_step_limits
from jaxpage.models.recurrence import Recurrence
from jaxpage.models.recurrent_config import MambaOptions
from jaxpage.models.rope import NO_ROPE, Rotation
from jaxpage.models.sources import Place, Source, Stacked
from jaxpage.models.starcoder2 import PlainMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NAME = "NemotronHForCausalLM"
_MLP = ("up_proj", "down_proj")
_MIXERS: dict[str, Literal["attention", "recurrence", "mlp"]] = {
    "linear_attention": "recurrence",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "mlp",
}


class NemotronHLayer(nnx.Module):
    """One mixer after a norm, beside a residual (transformers' NemotronHBlock)."""

    def __init__(self, config: ModelConfig, index: int):
        assert config.mixers is not None
        self.kind, experts = config.mixers[index], config.experts
        self.has_experts = experts is not None and index in experts.layers
        self.norm = hidden_norm(WideRMSNorm, config)
        self.mixer: nnx.Module
        if self.kind == "recurrence":
            self.mixer = Mamba2(config, index)
        elif self.kind == "attention":
            self.mixer = SelfAttention(config, index, WideRMSNorm)
        elif experts is not None and self.has_experts:
            shared = PlainMLP(config, _MLP, experts.shared_size)
            self.mixer = MixtureOfExperts(config, experts, shared)
        else:
            self.mixer = PlainMLP(config, _MLP)

    def __call__(
        self,
        x: jax.Array,
        rotation: Rotation,
        attention: Attention,
        is_token: jax.Array | None = None,
        load: list[jax.Array] | None = None,
        *,
        recurrence: Recurrence,
    ) -> jax.Array:
        more: tuple[Any, ...] = ()
        if self.kind == "recurrence":
            more = (recurrence,)
        elif self.kind == "attention":
            more = (rotation, attention)
        elif self.has_experts:
            more = (is_token, load)
        return x + self.mixer(self.norm(x), *more)  # pyright: ignore[reportCallIssue]


def nemotron_h(config: ModelConfig) -> CausalLM:
    """A Nemotron-H model."""
    return CausalLM(config, layer=NemotronHLayer, norm=WideRMSNorm)


def nemotron_h_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a NemotronHForCausalLM. Raises ValueError for what is not supported."""
    kinds: list[str] = hf.layers_block_type
    num_layers = len(kinds)
    unknown = sorted(set(kinds) - set(_MIXERS))
    if unknown or not {"linear_attention", "full_attention"} <= set(kinds):
        raise ValueError(
            f"{_NAME}: each layer must be one of {', '.join(_MIXERS)}, and at least one linear_attention (Mamba-2) and "
            f"one full_attention; config.json has {', '.join(kinds) or 'no layers'}: check layers_block_type or "
            "hybrid_override_pattern"
        )
    if hf.mamba_hidden_act != "silu":
        raise ValueError(
            f"{_NAME}: mamba_hidden_act is {hf.mamba_hidden_act!r}; supported is 'silu'"
        )
    sizes = recurrent_layers(
        hf,
        ("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim", "conv_kernel"),
        _NAME,
        layers=tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention"),
        options=MambaOptions(
            projection_bias=bool(hf.use_bias),
            convolution_bias=bool(hf.use_conv_bias),
            # As NVIDIA's own code. transformers 5 has time_step_min, which is for initial values, as the least in
            # prompts but not in decode steps; vLLM has no limits.
            time_steps=time_step_limits(hf, _NAME),
        ),
    )
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        architecture=_NAME,
        norm_eps=hf.layer_norm_epsilon,
        windows=(None,) * num_layers,
        ropes=(NO_ROPE,) * num_layers,
        # transformers and vLLM have neither biases in attention nor tied embeddings, whatever config.json says.
        qkv_bias=False,
        output_bias=False,
        tie_word_embeddings=False,
        mixers=tuple(_MIXERS[kind] for kind in kinds),
        recurrent=sizes,
        experts=_experts(hf, tuple(i for i, kind in enumerate(kinds) if kind == "moe")),
    )


def _experts(hf: PretrainedConfig, layers: tuple[int, ...]) -> ExpertsConfig | None:
    """With the router of transformers' NemotronHTopkRouter, which is DeepSeek-V3's."""
    if not layers:
        return None
    if hf.n_shared_experts != 1:
        raise ValueError(
            f"{_NAME}: n_shared_experts is {hf.n_shared_experts} in config.json; supported is 1"
        )
    return ExpertsConfig(
        layers=layers,
        num_experts=hf.n_routed_experts,
        experts_per_token=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        shares_add_up_to_one=bool(hf.norm_topk_prob),
        shared_size=hf.moe_shared_expert_intermediate_size,
        shared_gate=False,
        has_gate=False,
        latent_size=hf.moe_latent_size,
        routing=Routing(
            scores="sigmoid",
            has_correction=True,
            num_groups=hf.n_group or 1,
            chosen_groups=hf.topk_group or 1,
            factor=hf.routed_scaling_factor,
            in_float32=True,
        ),
    )


_EXPERTS = {"up_proj": "gate_up_proj", "down_proj": "down_proj"}  # theirs -> ours
_STACKED = re.compile(r"backbone\.(.*\.experts)\.(up_proj|down_proj)")
_RELEASED = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
}


def _released(path: str) -> str:
    """The name of a parameter, as a tensor of a released checkpoint."""
    prefix = next((each for each in _RELEASED if path.startswith(each)), None)
    return path if prefix is None else _RELEASED[prefix] + path.removeprefix(prefix)


def nemotron_h_name(name: str) -> str | None:
    """transformers 5 has other names in memory than in its files, where they are those of released checkpoints: `model`
    for `backbone`, and all experts of a layer in one tensor.
    """
    name = re.sub(r"^model\.", "backbone.", name)
    found = _STACKED.fullmatch(name)
    return name if found is None else f"model.{found[1]}.{_EXPERTS[found[2]]}"


def nemotron_h_parts(config: ModelConfig) -> dict[str, Place]:
    """Released checkpoints have `backbone` in place of `model`, all parts of Mamba-2's projection in one tensor, and a
    tensor for each projection of each expert.
    """
    places: dict[str, Place] = {}
    for path, _ in nnx.to_flat_state(nnx.state(nemotron_h(config), nnx.Param)):
        name = ".".join(map(str, path))
        places[name] = Source(_released(name))
    for i in () if config.recurrent is None else config.recurrent.layers:
        places |= mamba_parts(config, f"model.layers.{i}.mixer", f"backbone.layers.{i}.mixer")
    if config.experts is None:
        return places
    num_experts = config.experts.num_experts
    for i in config.experts.layers:
        for theirs, ours in _EXPERTS.items():
            path = f"layers.{i}.mixer.experts"
            parts = tuple(
                (f"backbone.{path}.{expert}.{theirs}.weight",) for expert in range(num_experts)
            )
            places[f"model.{path}.{ours}"] = Stacked(parts)
    return places
