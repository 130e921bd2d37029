"""Qwen3.5 and Qwen3-Next: most layers have a recurrent state in place of keys and values, the others gated attention.

Pictures of Qwen3.5 are those of Qwen3-VL. Knows transformers' names of the options, and how checkpoints store what
these layers have.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxpage.models.attention import Attention
from jaxpage.models.config import ExpertsConfig, ModelConfig, counts_of, decoder_config
from jaxpage.models.decoder import CausalLM, SelfAttention
from jaxpage.models.gated_delta_net import GatedDeltaNet
from jaxpage.models.hybrid import HybridLayer
from jaxpage.models.layers import Linear, Normal, OffsetRMSNorm
from jaxpage.models.mixtures import qwen_experts
from jaxpage.models.qwen3_vl import Qwen3VisionTower, tower_config
from jaxpage.models.recurrent_config import RecurrentLayers
from jaxpage.models.rope import Rotation
from jaxpage.models.sources import Place, Source, separate_experts
from jaxpage.models.vision import PictureLM, check_embeddings
from jaxpage.pictures.qwen_vision import Qwen3VisionConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RECURRENT, _FULL = "linear_attention", "full_attention"
_COUNTS = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)
# Defaults of config.json.
_PART = {"partial_rotary_factor": 0.25}
_MROPE = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}


class GatedAttention(SelfAttention):
    """Each query head has a gate, whose sigmoid its output is multiplied by (transformers' Qwen3_5Attention)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, OffsetRMSNorm)
        embed = config.hidden_size
        # For each head its queries, then its gates.
        self.q_proj = Linear(
            (2 * config.num_heads * self.head_dim, embed),
            axes=("heads", "embed"),
            units=(config.num_heads, embed),
            bias=config.qkv_bias,
            init=Normal(config.initializer_range),
            dtype=config.dtype,
        )

    @property
    def projection_sizes(self) -> dict[str, int]:
        sizes = super().projection_sizes
        return sizes | {"q_proj": 2 * sizes["q_proj"]}

    @property
    def _num_heads(self) -> tuple[int, int, int]:
        return 2 * self.config.num_heads, self.num_kv_heads, self.num_kv_heads

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        lead = x.shape[:-1]
        both, k, v = self._projected(x)
        both = both.reshape(*lead, self.config.num_heads, 2 * self.head_dim)
        q, gate = jnp.split(both, 2, axis=-1)
        out = self._attend(*self._turned(q.reshape(*lead, -1), k, v, rotation), attention)
        return self.o_proj((out * jax.nn.sigmoid(gate)).reshape(*lead, -1))


def _layer(config: ModelConfig, index: int) -> HybridLayer:
    """A layer with a recurrent state or gated attention."""
    layer = HybridLayer(config, index, name="linear_attn", part=GatedDeltaNet, norm=OffsetRMSNorm)
    if hasattr(layer, "self_attn"):
        layer.self_attn = GatedAttention(config, index)
    return layer


_PARTS = {"layer": _layer, "norm": OffsetRMSNorm}


def qwen3_5(config: ModelConfig) -> CausalLM:
    """A Qwen3.5 text model, or a Qwen3-Next."""
    return CausalLM(config, **_PARTS)


def qwen3_5_with_pictures(config: ModelConfig) -> PictureLM:
    """A Qwen3.5 with its vision tower, which is Qwen3-VL's."""
    assert isinstance(config.vision, Qwen3VisionConfig)
    return PictureLM(config, Qwen3VisionTower(config.vision, config.dtype), **_PARTS)


def qwen3_5_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
) -> ModelConfig:
    """ModelConfig of a Qwen3.5, or of the text part of one that takes pictures. Raises ValueError for what is not
    supported.
    """
    # A copy, since RoPE's parameters change, and pictures need those that the text part does without.
    text = copy.copy(hf.get_text_config())
    architecture = (hf.architectures or ["?"])[0]
    given = text.rope_parameters
    if "vision" in facts:
        text.rope_parameters = _PART | _MROPE | given
    else:  # all three positions of a token are the same
        text.rope_parameters = _PART | {k: x for k, x in given.items() if k not in _MROPE}
    return decoder_config(
        text,
        dtype=dtype,
        max_model_len=max_model_len,
        architecture=architecture,
        qk_norm=True,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        recurrent=_recurrent_layers(text, architecture),
        **_experts(text),
        **facts,
    )


def qwen3_5_pictures_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Qwen3_5ForConditionalGeneration, or of one with experts."""
    vision = tower_config(hf.vision_config)
    check_embeddings(vision.out_hidden_size, hf.get_text_config())
    return qwen3_5_config(hf, dtype=dtype, max_model_len=max_model_len, vision=vision)


def qwen3_next_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Qwen3NextForCausalLM. Raises ValueError for what is not supported."""
    experts = qwen_experts(
        hf,
        shares_add_up_to_one=bool(hf.norm_topk_prob),
        shared_size=hf.shared_expert_intermediate_size,
    )
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        qk_norm=True,
        recurrent=_recurrent_layers(hf, (hf.architectures or ["?"])[0]),
        experts=experts,
    )


def _recurrent_layers(text: PretrainedConfig, architecture: str) -> RecurrentLayers:
    kinds = text.layer_types
    unknown = sorted(set(kinds) - {_RECURRENT, _FULL})
    if unknown or len(kinds) != text.num_hidden_layers or not {_RECURRENT, _FULL} <= set(kinds):
        raise ValueError(
            f"{architecture}: layer_types must have {_RECURRENT} or {_FULL} for each of {text.num_hidden_layers} "
            f"layers, and both of them; config.json has {', '.join(kinds)}"
        )
    keys, values, key_dim, value_dim, num_taps = counts_of(text, _COUNTS, architecture)
    if values % keys:
        raise ValueError(
            f"{architecture}: {values} value heads cannot share {keys} key heads evenly; check "
            "linear_num_value_heads and linear_num_key_heads in config.json"
        )
    if text.hidden_act != "silu":
        raise ValueError(f"{architecture}: hidden_act is {text.hidden_act!r}; supported is 'silu'")
    return RecurrentLayers(
        layers=tuple(index for index, kind in enumerate(kinds) if kind == _RECURRENT),
        num_key_heads=keys,
        values_per_key=values // keys,
        key_dim=key_dim,
        value_dim=value_dim,
        num_taps=num_taps,
    )


def _experts(text: PretrainedConfig) -> dict[str, Any]:
    """Fields of a model with experts, in every layer."""
    if not getattr(text, "num_experts", None):
        return {}
    experts = ExpertsConfig(
        layers=tuple(range(text.num_hidden_layers)),
        num_experts=text.num_experts,
        experts_per_token=text.num_experts_per_tok,
        intermediate_size=text.moe_intermediate_size,
        shares_add_up_to_one=True,
        shared_size=text.shared_expert_intermediate_size,
    )
    return {"experts": experts, "intermediate_size": text.moe_intermediate_size}


def fused_delta_nets(config: ModelConfig) -> dict[str, Place]:
    """Qwen3.5: a recurrent layer's rows of q, k and v in one projection and one convolution; experts in one tensor, or
    each in its own.
    """
    return _fused(config, {"qkv": _qkv(config)}, groups=1)


def interleaved_delta_nets(config: ModelConfig) -> dict[str, Place]:
    """Qwen3-Next: the same, but the rows of a projection are by key head: those of q, k, v and z for each, and in
    another projection those of b and a.
    """
    sizes = config.recurrent
    assert sizes is not None
    values = sizes.values_per_key * sizes.value_dim
    projections = {
        "qkvz": {"q": sizes.key_dim, "k": sizes.key_dim, "v": values, "z": values},
        "ba": {"b": sizes.values_per_key, "a": sizes.values_per_key},
    }
    return _fused(config, projections, groups=sizes.num_key_heads)


def _qkv(config: ModelConfig) -> dict[str, int]:
    """Rows of q, k and v."""
    sizes = config.recurrent
    assert sizes is not None
    keys, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
    return {"q": keys, "k": keys, "v": values}


def _fused(
    config: ModelConfig, projections: dict[str, dict[str, int]], *, groups: int
) -> dict[str, Place]:
    """projections: name of a projection in checkpoints -> its parts, and the rows of each in each of its `groups`."""
    assert config.recurrent is not None
    places = separate_experts(config)
    for i in config.recurrent.layers:
        layer = f"model.layers.{i}.linear_attn"
        for part, source in _parts(f"{layer}.conv1d.weight", _qkv(config)).items():
            places[f"{layer}.conv.{part}"] = source
        for name, sizes in projections.items():
            for part, source in _parts(f"{layer}.in_proj_{name}.weight", sizes, groups).items():
                places[f"{layer}.in_proj_{part}.weight"] = source
    return places


def _parts(tensor: str, sizes: dict[str, int], groups: int = 1) -> dict[str, Source]:
    """The rows of each part, which follow each other in the tensor, or in each of its groups."""
    ends = itertools.accumulate(sizes.values())
    return {
        part: Source(tensor, end - size, end, groups)
        for (part, size), end in zip(sizes.items(), ends, strict=True)
    }
