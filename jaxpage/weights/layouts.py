"""How trainers store parameters: the place and form of each of ours in a tree of Tunix, MaxText or NNX.

Formats: google/tunix `models/*/params*.py`; AI-Hypercomputer/maxtext `checkpoint_conversion/utils/param_mapping.py` and
`layers/attentions.py`, both of August 2026. Knows names and shapes; must not know files or devices.

An axis is a letter: E model dim, H and K query and KV heads, D head dim, F MLP dim, V vocabulary, L layers, S the index
among arrays that are stored as one; h and k are H*D and K*D in one axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxpage.models.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """Axes of a stored array, their order in our parameter, and other differences."""

    stored: str
    ours: str
    factor: float = 1.0  # ours = stored * factor + offset
    offset: float = 0.0
    interleaved: bool = (
        False  # RoPE rotates the pairs (2d, 2d + 1) of the axis D instead of (d, d + D/2)
    )


@dataclass(frozen=True)
class Place:
    """The place of a parameter in a trainer's tree. No form: it is stored like ours."""

    array: str
    form: Form | None = None
    # Indices in the axes L and S, if the form has them.
    layer: int = 0
    part: int = 0
    num_layers: int = 0  # size of the axis L

    def shape(self, config: ModelConfig, ours: Shape, stored: Shape) -> Shape:
        """The expected shape of the array; a vocabulary may be padded."""
        if self.form is None:
            return ours
        sizes = _sizes(config) | {"L": self.num_layers, "S": stored[0] if stored else 0}
        wanted = [sizes[axis] for axis in self.form.stored]
        if "V" in self.form.stored and len(stored) == len(wanted):
            axis = self.form.stored.index("V")
            wanted[axis] = max(wanted[axis], stored[axis])
        return tuple(wanted)


@dataclass(frozen=True)
class Found:
    """The layout of a tree. `places`: of each parameter; `others`: weights that belong to no parameter."""

    trainer: str
    places: dict[str, Place]
    others: tuple[str, ...]


_EMBEDDING = "model.embed_tokens.weight"  # in jaxpage's models
_TUNIX_EMBEDDING, _MAXTEXT_EMBEDDING = "embedder.input_embedding", "token_embedder.embedding"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# State of a module that is not weights; MaxText's vision tower.
_NO_WEIGHTS = re.compile(r"(^|\.)(\w*rngs|dropout|vision_encoder)(\.|$)")
_NAMES_SHOWN = 5


def find_layout(config: ModelConfig, paths: Iterable[str], arrays: Mapping[str, Shape]) -> Found:
    """The places of the parameters `paths` among `arrays`, given names and shapes.

    The model may be a part of the tree, beside an optimizer. Raises ValueError for trees of no known layout.
    """
    lora = next((name for name in arrays if "lora" in name), None)
    if lora is not None:
        raise ValueError(f"the checkpoint has {lora}: merge LoRA weights into the model's first")
    embeddings = [
        (name, anchor)
        for name in arrays
        for anchor in (_EMBEDDING, _TUNIX_EMBEDDING, _MAXTEXT_EMBEDDING)
        if name == anchor or name.endswith(f".{anchor}")
    ]
    if not embeddings:
        shown = ", ".join(sorted(arrays)[:_NAMES_SHOWN])
        raise ValueError(
            f"the checkpoint has no {_EMBEDDING} (NNX), {_TUNIX_EMBEDDING} (Tunix) or {_MAXTEXT_EMBEDDING} "
            f"(MaxText), so its layout is not known; it has {len(arrays)} arrays: {shown}, ..."
        )
    # An optimizer repeats the tree under a prefix, so its names are longer.
    name, anchor = min(embeddings, key=lambda found: len(found[0]))
    prefix = name.removesuffix(anchor)
    weights = {
        theirs.removeprefix(prefix): theirs
        for theirs in arrays
        if theirs.startswith(prefix) and not _NO_WEIGHTS.search(theirs.removeprefix(prefix))
    }
    shapes = {short: arrays[theirs] for short, theirs in weights.items()}
    trainer, place = {
        _EMBEDDING: ("NNX", _same_place),
        _TUNIX_EMBEDDING: ("Tunix", _tunix_place),
        _MAXTEXT_EMBEDDING: ("MaxText", _maxtext_place),
    }[anchor]
    if trainer == "MaxText":  # nnx.List has layers.0, Linen layers_0
        weights = {_joined_index(short): theirs for short, theirs in weights.items()}
        shapes = {_joined_index(short): shape for short, shape in shapes.items()}
    found = {path: place(config, path, shapes) for path in paths}
    taken = {each.array for each in found.values()}
    return Found(
        trainer,
        {
            path: replace(each, array=weights.get(each.array, prefix + each.array))
            for path, each in found.items()
        },
        tuple(theirs for short, theirs in weights.items() if short not in taken),
    )


def _joined_index(name: str) -> str:
    return re.sub(r"\.(\d+)(?=\.|$)", r"_\1", name)


def _same_place(config: ModelConfig, path: str, arrays: Mapping[str, Shape]) -> Place:
    del config, arrays
    return Place(path)


def _sizes(config: ModelConfig) -> dict[str, int]:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    return {
        "E": config.hidden_size,
        "F": config.intermediate_size,
        "V": config.vocab_size,
        "H": heads,
        "K": kv_heads,
        "D": dim,
        "h": heads * dim,
        "k": kv_heads * dim,
    }


Table = dict[str, tuple[str, Form]]  # our name -> theirs, and its form; {} is the layer

_Q, _KV, _O = Form("EHD", "HDE"), Form("EKD", "KDE"), Form("HDE", "EHD")
_UP, _DOWN = Form("EF", "FE"), Form("FE", "EF")
_VECTOR, _PER_HEAD = Form("E", "E"), Form("D", "D")
_TABLE, _HEAD = Form("VE", "VE"), Form("EV", "VE")

_TUNIX: Table = {
    "model.embed_tokens.weight": ("embedder.input_embedding", _TABLE),
    "model.norm.weight": ("final_norm.w", _VECTOR),
    "lm_head.weight": ("lm_head.w", _HEAD),
    "self_attn.q_proj.weight": ("layers.{}.attn.q_proj.w", _Q),
    "self_attn.k_proj.weight": ("layers.{}.attn.k_proj.w", _KV),
    "self_attn.v_proj.weight": ("layers.{}.attn.v_proj.w", _KV),
    "self_attn.o_proj.weight": ("layers.{}.attn.o_proj.w", _O),
    "self_attn.q_proj.bias": ("layers.{}.attn.q_bias", Form("h", "h")),
    "self_attn.k_proj.bias": ("layers.{}.attn.k_bias", Form("k", "k")),
    "self_attn.v_proj.bias": ("layers.{}.attn.v_bias", Form("k", "k")),
    "self_attn.q_norm.weight": ("layers.{}.attn.q_norm.w", _PER_HEAD),
    "self_attn.k_norm.weight": ("layers.{}.attn.k_norm.w", _PER_HEAD),
    "input_layernorm.weight": ("layers.{}.input_layernorm.w", _VECTOR),
    "post_attention_layernorm.weight": ("layers.{}.post_attention_layernorm.w", _VECTOR),
    "mlp.gate_proj.weight": ("layers.{}.mlp.gate_proj.kernel", _UP),
    "mlp.up_proj.weight": ("layers.{}.mlp.up_proj.kernel", _UP),
    "mlp.down_proj.weight": ("layers.{}.mlp.down_proj.kernel", _DOWN),
}
_TUNIX_GEMMA: Table = _TUNIX | {
    "model.norm.weight": ("final_norm.scale", _VECTOR),
    "self_attn.q_proj.weight": ("layers.{}.attn.q_einsum.w", Form("HED", "HDE")),
    "self_attn.k_proj.weight": ("layers.{}.attn.kv_einsum.w", Form("SKED", "KDE")),
    "self_attn.v_proj.weight": ("layers.{}.attn.kv_einsum.w", Form("SKED", "KDE")),
    "self_attn.o_proj.weight": ("layers.{}.attn.attn_vec_einsum.w", _O),
    "self_attn.q_norm.weight": ("layers.{}.attn._query_norm.scale", _PER_HEAD),
    "self_attn.k_norm.weight": ("layers.{}.attn._key_norm.scale", _PER_HEAD),
    "input_layernorm.weight": ("layers.{}.pre_attention_norm.scale", _VECTOR),
    "post_attention_layernorm.weight": ("layers.{}.post_attention_norm.scale", _VECTOR),
    "pre_feedforward_layernorm.weight": ("layers.{}.pre_ffw_norm.scale", _VECTOR),
    "post_feedforward_layernorm.weight": ("layers.{}.post_ffw_norm.scale", _VECTOR),
}
# With as many KV heads as query heads all three projections are one array.
_TUNIX_GEMMA_MHA: Table = _TUNIX_GEMMA | {
    f"self_attn.{name}_proj.weight": ("layers.{}.attn.qkv_einsum.w", Form("SHED", "HDE"))
    for name in "qkv"
}

# {0} is the layer, or empty if layers are stacked.
_MAXTEXT: Table = {
    "model.embed_tokens.weight": ("token_embedder.embedding", _TABLE),
    "model.norm.weight": ("decoder.decoder_norm.scale", _VECTOR),
    "lm_head.weight": ("decoder.logits_dense.kernel", _HEAD),
    "self_attn.q_proj.weight": ("self_attention.query.kernel", _Q),
    "self_attn.k_proj.weight": ("self_attention.key.kernel", _KV),
    "self_attn.v_proj.weight": ("self_attention.value.kernel", _KV),
    "self_attn.o_proj.weight": ("self_attention.out.kernel", _O),
    "self_attn.q_proj.bias": ("self_attention.query.bias", Form("HD", "HD")),
    "self_attn.k_proj.bias": ("self_attention.key.bias", Form("KD", "KD")),
    "self_attn.v_proj.bias": ("self_attention.value.bias", Form("KD", "KD")),
    "self_attn.q_norm.weight": ("self_attention.query_norm.scale", _PER_HEAD),
    "self_attn.k_norm.weight": ("self_attention.key_norm.scale", _PER_HEAD),
    "input_layernorm.weight": ("pre_self_attention_layer_norm.scale", _VECTOR),
    "post_attention_layernorm.weight": ("post_self_attention_layer_norm.scale", _VECTOR),
    "mlp.gate_proj.weight": ("mlp.wi_0.kernel", _UP),
    "mlp.up_proj.weight": ("mlp.wi_1.kernel", _UP),
    "mlp.down_proj.weight": ("mlp.wo.kernel", _DOWN),
}
# Norm weights include the 1 there, but not here.
_FROM_ONE, _FROM_ONE_PER_HEAD = replace(_VECTOR, offset=-1.0), replace(_PER_HEAD, offset=-1.0)
_MAXTEXT_GEMMA: Table = _MAXTEXT | {
    "model.norm.weight": ("decoder.decoder_norm.scale", _FROM_ONE),
    "self_attn.q_norm.weight": ("self_attention.query_norm.scale", _FROM_ONE_PER_HEAD),
    "self_attn.k_norm.weight": ("self_attention.key_norm.scale", _FROM_ONE_PER_HEAD),
    "input_layernorm.weight": ("pre_self_attention_norm.scale", _FROM_ONE),
    "post_attention_layernorm.weight": ("post_self_attention_norm.scale", _FROM_ONE),
    "pre_feedforward_layernorm.weight": ("pre_ffw_norm.scale", _FROM_ONE),
    "post_feedforward_layernorm.weight": ("post_ffw_norm.scale", _FROM_ONE),
}
_GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
_GEMMA3_PATTERN = 6  # layers per step of MaxText's scan: five local ones and a global one
_FAMILIES = {
    "Tunix": ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", *_GEMMA3),
    "MaxText": (
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        *_GEMMA3,
    ),
}


def _row(table: Table, trainer: str, config: ModelConfig, path: str) -> tuple[int, str, Form]:
    """The layer of a parameter, its name in the trainer's tree, and its form. Raises ValueError."""
    if config.architecture not in _FAMILIES[trainer]:
        raise ValueError(
            f"{trainer}'s checkpoints of {config.architecture} are not supported; supported are "
            f"{', '.join(_FAMILIES[trainer])}"
        )
    match = _LAYER.fullmatch(path)
    layer, name = (int(match[1]), match[2]) if match else (-1, path)
    if name.startswith("visual."):
        raise ValueError(
            f"{trainer}'s vision tower is not read; take the text part alone with limit_mm_per_prompt="
            '{"image": 0}'
        )
    if name not in table:
        raise ValueError(f"{trainer} has no place for {path}: check config.json")
    return layer, *table[name]


def _tunix_place(config: ModelConfig, path: str, arrays: Mapping[str, Shape]) -> Place:
    del arrays
    table = _TUNIX
    if config.architecture in _GEMMA3:
        is_mha = config.num_heads == config.num_kv_heads
        table = _TUNIX_GEMMA_MHA if is_mha else _TUNIX_GEMMA
    layer, name, form = _row(table, "Tunix", config, path)
    letters = "qkv" if form.stored == "SHED" else "kv"
    projection = path.removesuffix("_proj.weight")[-1]
    return Place(name.format(layer), form, part=max(0, letters.find(projection)))


def _maxtext_place(config: ModelConfig, path: str, arrays: Mapping[str, Shape]) -> Place:
    is_gemma = config.architecture in _GEMMA3
    layer, name, form = _row(_MAXTEXT_GEMMA if is_gemma else _MAXTEXT, "MaxText", config, path)
    form = _maxtext_form(config, path, form)
    if layer < 0:
        return Place(name, form)
    folder, index, num_layers = _maxtext_layer(config, layer, arrays)
    name = f"decoder.{folder}.{name}"
    if num_layers == 0:
        return Place(name, form)
    # By default MaxText stacks along the second axis.
    stacked = [form.stored[0] + "L" + form.stored[1:], "L" + form.stored]
    places = [Place(name, replace(form, stored=axes), index, 0, num_layers) for axes in stacked]
    shape = arrays.get(name, ())
    fitting = [place for place in places if place.shape(config, (), shape) == shape]
    return (fitting or places)[0]


def _maxtext_layer(
    config: ModelConfig, layer: int, arrays: Mapping[str, Shape]
) -> tuple[str, int, int]:
    """(folder, index in the stacked arrays, number of layers in them, 0 if not stacked) of a layer."""
    if not any(name.startswith("decoder.layers.") for name in arrays):
        return f"layers_{layer}", 0, 0
    if config.architecture not in _GEMMA3:
        return "layers", layer, config.num_layers
    rounds = config.num_layers // _GEMMA3_PATTERN
    if layer >= rounds * _GEMMA3_PATTERN:
        return f"layers_remainder.layers_{layer - rounds * _GEMMA3_PATTERN}", 0, 0
    return f"layers.layers_{layer % _GEMMA3_PATTERN}", layer // _GEMMA3_PATTERN, rounds


def _maxtext_form(config: ModelConfig, path: str, form: Form) -> Form:
    """Gemma 3's embedding and Llama's and Mistral's queries include a scale there; Llama 3.1's RoPE is interleaved."""
    if config.architecture in _GEMMA3 and path == _EMBEDDING:
        scale = ml_dtypes.bfloat16(config.hidden_size**0.5)
        return replace(form, factor=1 / float(scale))
    if config.architecture not in ("LlamaForCausalLM", "MistralForCausalLM"):
        return form
    interleaved = config.ropes[0].kind == "llama3" and re.search(r"[qk]_proj\.weight$", path)
    factor = config.head_dim**0.5 if path.endswith("q_proj.weight") else 1.0
    return replace(form, factor=factor, interleaved=bool(interleaved))


def take(place: Place, stored: Any, shape: Shape, dtype: np.dtype, layer: Any = None) -> Any:
    """The parameter of `shape` from its array, of NumPy or jax; a traced `layer` replaces the place's."""
    form = place.form
    if form is None:
        return stored.astype(dtype)
    axes, x = form.stored, stored
    for axis, index in (("L", place.layer if layer is None else layer), ("S", place.part)):
        if axis in axes:
            x = x[(slice(None),) * axes.index(axis) + (index,)]
            axes = axes.replace(axis, "")
    if form.interleaved:  # D is the last axis of queries and keys
        x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
    x = x.transpose([axes.index(axis) for axis in form.ours])
    if form.ours[0] == "V":
        x = x[: shape[0]]
    if form.factor != 1 or form.offset != 0:
        x = x.astype(np.float32) * np.float32(form.factor) + np.float32(form.offset)
    return x.reshape(shape).astype(dtype)
