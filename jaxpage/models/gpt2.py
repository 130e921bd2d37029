"""GPT-2: learned positions, LayerNorms and MLPs without a gate, and weights that are stored [in, out].

The rest is the shared decoder. Knows transformers' names of GPT-2's options and tensors; must not know files.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM, Decoder
from jaxpage.models.family import Family
from jaxpage.models.layers import Embedding, LayerNorm, Normal
from jaxpage.models.rope import NO_ROPE
from jaxpage.models.sources import Place, Source
from jaxpage.models.starcoder2 import PlainLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GPT2Layer(PlainLayer):
    """transformers' GPT2Block."""

    def __init__(self, config: ModelConfig, index: int):
        if config.scale_falls:
            config = replace(config, attention_scale=config.attention_scale / (index + 1))
        super().__init__(config, index, norm=LayerNorm, names=("c_fc", "c_proj"))


class GPT2Decoder(Decoder):
    """Embeddings of positions are added to those of tokens, and to what is given in their place."""

    def __init__(self, config: ModelConfig, *parts: Any):
        super().__init__(config, *parts)
        assert config.num_positions is not None
        self.embed_positions = Embedding(
            config.num_positions,
            config.hidden_size,
            axis="positions",
            init=Normal(config.initializer_range),
            dtype=config.dtype,
        )

    def placed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return x + self.embed_positions(positions)


_model = partial(CausalLM, layer=GPT2Layer, norm=LayerNorm, decoder=GPT2Decoder)


def _config(hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None) -> ModelConfig:
    """ModelConfig of a GPT2LMHeadModel. `reorder_and_upcast_attn` asks for scores in float32, as they always are."""
    num_positions: int = hf.max_position_embeddings
    if max_model_len is not None and max_model_len > num_positions:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the {num_positions} positions that the model has embeddings for "
            "(n_positions in config.json); lower it"
        )
    size, num_heads = hf.hidden_size, hf.num_attention_heads
    if size % num_heads:
        raise ValueError(
            f"n_embd {size} is not a multiple of n_head {num_heads}; correct config.json"
        )
    if hf.add_cross_attention:
        raise ValueError(
            "add_cross_attention is set in config.json: a decoder that reads an encoder's states is not supported"
        )
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        num_kv_heads=num_heads,
        head_dim=size // num_heads,
        intermediate_size=hf.n_inner or 4 * size,
        norm_eps=hf.layer_norm_epsilon,
        ropes=(NO_ROPE,) * hf.num_hidden_layers,
        attention_scale=(size // num_heads) ** -0.5 if hf.scale_attn_weights else 1.0,
        scale_falls=bool(hf.scale_attn_by_inverse_layer_idx),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        num_positions=num_positions,
    )


_EMBEDDING = ("model.embed_tokens.", "transformer.wte.")
# Ours -> theirs.
_NAMES = {
    "model.embed_positions.": "transformer.wpe.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".self_attn.o_proj.": ".attn.c_proj.",
} | dict((_EMBEDDING,))
_QKV = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)")
_TURNED = re.compile(r".*\.(attn|mlp)\.c_\w+\.weight")  # transformers' Conv1D
_BUFFER = re.compile(r".*\.attn\.(bias|masked_bias)")
_WITHOUT_HEAD = ("wte.", "wpe.", "h.", "ln_f.")


def _parts(config: ModelConfig) -> dict[str, Place]:
    """GPT-2 has its own names, and q, k and v in one tensor."""
    places: dict[str, Place] = {}
    for path, _ in nnx.to_flat_state(nnx.state(_model(config), nnx.Param)):
        name = ".".join(map(str, path))
        places[name] = _place(name, config)
    return places


def _place(name: str, config: ModelConfig) -> Place:
    if found := _QKV.fullmatch(name):
        start = "qkv".index(found[2]) * config.hidden_size
        name = f"transformer.h.{found[1]}.attn.c_attn.{found[3]}"
        return Source(name, start, start + config.hidden_size, turns=found[3] == "weight")
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return Source(name, turns=_TURNED.fullmatch(name) is not None)


def _name(name: str) -> str | None:
    """Released checkpoints omit the prefix. The embedding, which is the head too, has our name."""
    name = f"transformer.{name}" if name.startswith(_WITHOUT_HEAD) else name
    ours, theirs = _EMBEDDING
    return ours + name.removeprefix(theirs) if name.startswith(theirs) else name


def _buffers(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is a mask or the number for masked scores, which released checkpoints contain."""
    del config
    return _BUFFER.fullmatch(name) is not None


GPT_2 = Family(
    config_from_hf=_config, module=_model, weight_map=_parts, tensor_name=_name, is_idle=_buffers
)
