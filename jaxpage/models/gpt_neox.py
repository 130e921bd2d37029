"""GPT-NeoX, such as Pythia: attention and MLP in parallel, each with a LayerNorm of its own.

The rest is the shared decoder. Knows transformers' names of GPT-NeoX's options and tensors; must not know files.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM, Rotation
from jaxpage.models.family import Family
from jaxpage.models.layers import LayerNorm
from jaxpage.models.sources import Place, Source
from jaxpage.models.starcoder2 import PlainLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class NeoXLayer(PlainLayer):
    """The MLP reads the layer's input, as attention does, or else its sum with what attention returns (transformers'
    GPTNeoXLayer).
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, norm=LayerNorm, names=("up_proj", "down_proj"))
        self.is_parallel = config.parallel_residual

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        if not self.is_parallel:
            return super().__call__(x, rotation, attention)
        attended = self.self_attn(self.input_layernorm(x), rotation, attention)
        return self.mlp(self.post_attention_layernorm(x)) + attended + x


_model = partial(CausalLM, layer=NeoXLayer, norm=LayerNorm)


def _config(hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None) -> ModelConfig:
    """ModelConfig of a GPTNeoXForCausalLM, whose MLPs always have biases."""
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        num_kv_heads=hf.num_attention_heads,
        norm_eps=hf.layer_norm_eps,
        mlp_bias=True,
        parallel_residual=bool(hf.use_parallel_residual),
    )


_EMBEDDING, _HEAD = ("model.embed_tokens.", "gpt_neox.embed_in."), ("lm_head.", "embed_out.")
# Ours -> theirs.
_NAMES = {
    "model.norm.": "gpt_neox.final_layer_norm.",
    "model.layers.": "gpt_neox.layers.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
} | dict((_EMBEDDING, _HEAD))
_QKV = re.compile(r"model\.(layers\.\d+)\.self_attn\.([qkv])_proj\.(weight|bias)")
_BUFFER = re.compile(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
_WITHOUT_HEAD = ("embed_in.", "layers.", "final_layer_norm.")


def _parts(config: ModelConfig) -> dict[str, Place]:
    """GPT-NeoX has its own names, and for each head rows of its query, key and value in one tensor."""
    places: dict[str, Place] = {}
    for path, _ in nnx.to_flat_state(nnx.state(_model(config), nnx.Param)):
        name = ".".join(map(str, path))
        places[name] = _place(name, config)
    return places


def _place(name: str, config: ModelConfig) -> Place:
    if found := _QKV.fullmatch(name):
        start = "qkv".index(found[2]) * config.head_dim
        tensor = f"gpt_neox.{found[1]}.attention.query_key_value.{found[3]}"
        return Source(tensor, start, start + config.head_dim, groups=config.num_heads)
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return Source(name)


def _name(name: str) -> str | None:
    """Models without a head omit the prefix. Embedding and head have our names: they may be tied."""
    name = f"gpt_neox.{name}" if name.startswith(_WITHOUT_HEAD) else name
    for ours, theirs in (_EMBEDDING, _HEAD):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _buffers(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is a mask or RoPE frequencies, which released checkpoints contain."""
    del config
    return _BUFFER.fullmatch(name) is not None


GPT_NEOX = Family(
    config_from_hf=_config, module=_model, weight_map=_parts, tensor_name=_name, is_idle=_buffers
)
