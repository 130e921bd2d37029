"""Falcon-H1: attention and Mamba-2 side by side in each layer (TII, https://arxiv.org/abs/2507.22448).

Constant factors from the config are between all parts. Knows transformers' names of the options, and where checkpoints
have the parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import jax

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig, Scales, decoder_config
from jaxpage.models.decoder import MLP, CausalLM, Decoder, DecoderLayer
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, times
from jaxpage.models.mamba2 import Mamba2, mamba_parts, recurrent_layers, time_step_limits
from jaxpage.models.recurrence import Recurrence
from jaxpage.models.recurrent_config import MambaOptions, RecurrentLayers
from jaxpage.models.rope import Rotation
from jaxpage.models.sources import Place, Source

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NAME = "FalconH1ForCausalLM"
_COUNTS = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv")
_FACTORS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
_NUM_PARTS = 5  # of Mamba-2's projection, each with a factor


class FalconMLP(MLP):
    """down(activation(gate(x) * factor) * up(x)) * factor (transformers' FalconH1MLP)"""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        assert config.scales.mlp is not None
        self.gate_factor, self.out_factor = config.scales.mlp

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self._gate_and_up(x)
        gate = ACTIVATION_FUNCTIONS[self.activation](times(gate, self.gate_factor))
        return times(self.down_proj(gate * up), self.out_factor)


class FalconH1Layer(DecoderLayer):
    """The sum of attention and Mamba-2, then an MLP (transformers' FalconH1DecoderLayer)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        scales = config.scales
        assert scales.attention is not None and scales.recurrence is not None
        self.attention_factors, self.mamba_factors = scales.attention, scales.recurrence
        self.mamba = Mamba2(config, index)
        self.mlp = FalconMLP(config)

    def first_half(
        self,
        x: jax.Array,
        rotation: Rotation,
        attention: Attention,
        recurrence: Recurrence | None,
    ) -> jax.Array:
        assert recurrence is not None
        normed = self.input_layernorm(x)
        before, after = self.mamba_factors
        mixed = times(self.mamba(times(normed, before), recurrence), after)
        before, after = self.attention_factors
        attended = self.self_attn(times(normed, before), rotation, attention)
        return mixed + times(attended, after)


class FalconDecoder(Decoder):
    """The factor of embeddings is not rounded to the model's dtype."""

    def embed(self, token_ids: jax.Array) -> jax.Array:
        factor = self.config.scales.embedding
        assert factor is not None
        return times(self.embed_tokens(token_ids), factor)


def falcon_h1(config: ModelConfig) -> CausalLM:
    """A Falcon-H1 model."""
    return CausalLM(config, layer=FalconH1Layer, decoder=FalconDecoder)


def falcon_h1_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a FalconH1ForCausalLM. Raises ValueError for what is not supported."""
    if hf.hidden_act != "silu":
        raise ValueError(f"{_NAME}: hidden_act is {hf.hidden_act!r}; supported is 'silu'")
    factor = {name: _factor(hf, f"{name}_multiplier") for name in _FACTORS}
    config = decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        scales=Scales(
            embedding=factor["embedding"],
            logits=factor["lm_head"],
            attention=(factor["attention_in"], factor["attention_out"]),
            recurrence=(factor["ssm_in"], factor["ssm_out"]),
            mlp=_factors(hf, "mlp_multipliers", 2),
        ),
        recurrent=_recurrent(hf),
    )
    # All of a key is multiplied by its factor, so the product with a query may be instead.
    return replace(config, attention_scale=config.attention_scale * factor["key"])


def _factor(hf: PretrainedConfig, name: str) -> float:
    factor = getattr(hf, name)
    if not isinstance(factor, int | float):
        raise ValueError(f"{_NAME}: {name} is {factor!r} in config.json; it must be a number")
    return factor


def _factors(hf: PretrainedConfig, name: str, number: int) -> Any:
    """As many numbers as a tuple."""
    found = tuple(getattr(hf, name))
    if len(found) != number:
        raise ValueError(
            f"{_NAME}: {name} has {len(found)} numbers in config.json; it must have {number}"
        )
    return found


def _recurrent(hf: PretrainedConfig) -> RecurrentLayers:
    sizes = recurrent_layers(
        hf,
        _COUNTS,
        _NAME,
        layers=tuple(range(hf.num_hidden_layers)),
        options=MambaOptions(
            projection_bias=bool(hf.mamba_proj_bias),
            convolution_bias=bool(hf.mamba_conv_bias),
            time_steps=time_step_limits(hf, _NAME),
            output_bias=bool(hf.projectors_bias),
            norm=_norm(hf),
            factors=_factors(hf, "ssm_multipliers", _NUM_PARTS),
        ),
    )
    return replace(sizes, beside_attention=True)


def _norm(hf: PretrainedConfig) -> Literal["gated", "before the gate"] | None:
    if not hf.mamba_rms_norm:
        return None
    return "before the gate" if hf.mamba_norm_before_gate else "gated"


def falcon_h1_parts(config: ModelConfig) -> dict[str, Place]:
    """Falcon-H1 has its own names of norms and MLPs, and all parts of Mamba-2's projection in one tensor."""
    places: dict[str, Place] = {"model.norm.weight": Source("model.final_layernorm.weight")}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        norm = Source(f"{layer}.pre_ff_layernorm.weight")
        places[f"{layer}.post_attention_layernorm.weight"] = norm
        for part in ("gate_proj", "up_proj", "down_proj"):
            for name in ("weight", "bias"):
                place = Source(f"{layer}.feed_forward.{part}.{name}")
                places[f"{layer}.mlp.{part}.{name}"] = place
        places |= mamba_parts(config, f"{layer}.mamba", f"{layer}.mamba")
    return places
