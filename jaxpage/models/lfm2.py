"""LFM2 and LFM2-MoE: most layers are short convolutions between two gates, the others attention (LiquidAI,
https://arxiv.org/abs/2511.23404).

Such a convolution keeps its last inputs and nothing else. Knows transformers' names of the options, and where
checkpoints have the parameters.

Letters: T tokens, E model dim and channels, W taps.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import ExpertsConfig, ModelConfig, Routing, counts_of, decoder_config
from jaxpage.models.decoder import CausalLM
from jaxpage.models.hybrid import HybridLayer
from jaxpage.models.layers import Constant, Linear, Normal, param
from jaxpage.models.recurrence import Recurrence
from jaxpage.models.recurrent_config import RecurrentLayers
from jaxpage.models.sources import Place, Source, Stacked

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CONVOLUTION, _FULL = "conv", "full_attention"
_PARTS = ("B", "C", "x")  # of the input projection, in the order of its rows in checkpoints


class ShortConvolution(nnx.Module):
    """out_proj(C * convolution(B * x)), where B, C and x are projections (transformers' Lfm2ShortConv)."""

    def __init__(self, config: ModelConfig, index: int):
        assert config.recurrent is not None
        self.index, self.num_channels = index, config.hidden_size
        sizes, embed, dtype = config.recurrent, config.hidden_size, config.dtype
        init, has_bias = Normal(config.initializer_range), sizes.convolution_bias

        def projection(axes: tuple[str, str]) -> Linear:
            return Linear((embed, embed), axes=axes, bias=has_bias, init=init, dtype=dtype)

        for part in _PARTS:
            setattr(self, f"in_proj_{part}", projection(("heads", "embed")))
        self.in_proj: Linear | None = None  # joined, see `weights.transform`
        axes = ("heads", "taps", "taps")
        self.weight = param((embed, 1, sizes.num_taps), axes=axes, init=init, dtype=dtype)
        bias = param((embed,), axes=("heads",), init=Constant(0.0), dtype=dtype)
        self.bias = bias if has_bias else None
        self.out_proj = projection(("embed", "heads"))

    @property
    def joined_projections(self) -> dict[str, dict[str, int]]:
        """Name of the joined projection -> its parts and their outputs, in order."""
        return {"in_proj": {f"in_proj_{part}": self.num_channels for part in _PARTS}}

    def __call__(self, x: jax.Array, recurrence: Recurrence) -> jax.Array:
        """[..., T, E] of x [..., T, E]"""
        before, after, values = self._projected(x)
        (sums,) = recurrence.convolve(self.index, [before * values], [self.weight[...][:, 0]])
        if self.bias is not None:
            sums += jnp.expand_dims(self.bias[...].astype(jnp.float32), range(sums.ndim - 1))
        return self.out_proj(after * sums.astype(x.dtype))

    def _projected(self, x: jax.Array) -> list[jax.Array]:
        """B, C, x"""
        if self.in_proj is None:
            return [getattr(self, f"in_proj_{part}")(x) for part in _PARTS]
        return jnp.split(self.in_proj(x), len(_PARTS), axis=-1)


def lfm2(config: ModelConfig) -> CausalLM:
    """An LFM2 model."""
    return CausalLM(config, layer=partial(HybridLayer, name="conv", part=ShortConvolution))


def lfm2_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
) -> ModelConfig:
    """ModelConfig of an Lfm2ForCausalLM; `facts` as of `decoder_config`. Raises ValueError for what is not
    supported.
    """
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        **{
            "norm_eps": hf.norm_eps,
            "activation": "silu",
            "qk_norm": True,
            # transformers has none, whatever config.json says.
            "qkv_bias": False,
            "output_bias": False,
            "recurrent": _convolutions(hf),
        }
        | ({} if "experts" in facts else {"intermediate_size": _mlp_dim(hf)})
        | facts,
    )


def lfm2_moe_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of an Lfm2MoeForCausalLM. Raises ValueError for what is not supported."""
    layers = tuple(range(max(hf.num_dense_layers, 0), hf.num_hidden_layers))
    experts = ExpertsConfig(
        layers=layers,
        num_experts=hf.num_experts,
        experts_per_token=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        shares_add_up_to_one=bool(hf.norm_topk_prob),
        routing=Routing(
            scores="sigmoid",
            has_correction=bool(hf.use_expert_bias),
            added_to_sum=1e-6,
            factor=hf.routed_scaling_factor,
        ),
    )
    own = experts if layers else None
    return lfm2_config(hf, dtype=dtype, max_model_len=max_model_len, experts=own)


def _name(hf: PretrainedConfig) -> str:
    return (hf.architectures or ["?"])[0]


def _mlp_dim(hf: PretrainedConfig) -> int:
    """As transformers' Lfm2MLP computes it from the options of config.json, where `intermediate_size` is
    `block_ff_dim` too.
    """
    size, multiple = counts_of(hf, ("intermediate_size", "block_multiple_of"), _name(hf))
    if not hf.block_auto_adjust_ff_dim:
        return size
    factor = hf.block_ffn_dim_multiplier
    adjusted = multiple * -(-int(factor * int(2 * size / 3)) // multiple)
    if adjusted < 1:
        raise ValueError(
            f"{_name(hf)}: MLPs of {adjusted} from an intermediate_size (block_ff_dim) of {size} and "
            f"block_ffn_dim_multiplier {factor}; check both in config.json"
        )
    return adjusted


def _convolutions(hf: PretrainedConfig) -> RecurrentLayers | None:
    kinds = hf.layer_types or []
    unknown = sorted(set(kinds) - {_CONVOLUTION, _FULL})
    if unknown or len(kinds) != hf.num_hidden_layers or _FULL not in kinds:
        raise ValueError(
            f"{_name(hf)}: layer_types must have {_CONVOLUTION} or {_FULL} for each of {hf.num_hidden_layers} layers, "
            f"and at least one {_FULL}; config.json has {', '.join(kinds) or 'none'}"
        )
    if _CONVOLUTION not in kinds:
        return None
    (num_taps,) = counts_of(hf, ("conv_L_cache",), _name(hf))
    return RecurrentLayers(
        layers=tuple(index for index, kind in enumerate(kinds) if kind == _CONVOLUTION),
        num_key_heads=hf.hidden_size,
        values_per_key=1,
        key_dim=0,
        value_dim=1,
        num_taps=num_taps,
        convolution_bias=bool(hf.conv_bias),
    )


_NAMES = {
    r"^model\.norm\.": "model.embedding_norm.",
    r"\.input_layernorm\.": ".operator_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.self_attn\.o_proj\.": ".self_attn.out_proj.",
    r"\.self_attn\.([qk])_norm\.": r".self_attn.\1_layernorm.",
    r"\.conv\.(weight|bias)$": r".conv.conv.\1",
    r"\.mlp\.gate\.e_score_correction_bias$": ".feed_forward.expert_bias",
    r"\.mlp\.gate_proj\.": ".feed_forward.w1.",
    r"\.mlp\.up_proj\.": ".feed_forward.w3.",
    r"\.mlp\.down_proj\.": ".feed_forward.w2.",
    r"\.mlp\.": ".feed_forward.",
}  # ours -> theirs; the first that matches
_PROJECTION = re.compile(r"(.*\.conv)\.in_proj_([BCx])\.(weight|bias)")


def lfm2_name(name: str) -> str | None:
    """All experts of a layer in one tensor, as transformers 5 has them in memory, are named as ours."""
    return re.sub(r"\.feed_forward\.(experts\.(?:gate_up|down)_proj)$", r".mlp.\1", name)


def lfm2_parts(config: ModelConfig) -> dict[str, Place]:
    """LFM2 has its own names, B, C and x in one projection, and a tensor for each projection of each expert."""
    places: dict[str, Place] = {}
    for path, _ in nnx.to_flat_state(nnx.state(lfm2(config), nnx.Param)):
        name = ".".join(map(str, path))
        places[name] = _place(name, config)
    return places


def _place(name: str, config: ModelConfig) -> Place:
    if found := _PROJECTION.fullmatch(name):
        start = _PARTS.index(found[2]) * config.hidden_size
        return Source(f"{found[1]}.in_proj.{found[3]}", start, start + config.hidden_size)
    if ".experts." in name and config.experts is not None:
        module = name.rpartition(".")[0].replace(".mlp.", ".feed_forward.")
        projections = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
        return Stacked(
            tuple(
                tuple(f"{module}.{expert}.{each}.weight" for each in projections)
                for expert in range(config.experts.num_experts)
            )
        )
    for ours, theirs in _NAMES.items():
        renamed, number = re.subn(ours, theirs, name)
        if number:
            return Source(renamed)
    return Source(name)
