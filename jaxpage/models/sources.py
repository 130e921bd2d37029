"""Where parameters are in a Hugging Face checkpoint, if not in a tensor with the same name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jaxpage.models.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """Rows `start .. stop` of a checkpoint's tensor; all by default. If the rows are `groups` equal groups, one after
    the other: these rows of each group. turns: the tensor is [I, O], and its columns are meant; quantised ones are not.
    """

    tensor: str
    start: int = 0
    stop: int | None = None
    groups: int = 1
    turns: bool = False

    def rows(self, num_rows: int) -> slice | np.ndarray:
        """The index of these rows in a tensor that has `num_rows`."""
        part = slice(self.start, self.stop)
        if self.groups == 1:
            return part
        return np.arange(num_rows).reshape(self.groups, -1)[:, part].reshape(-1)


@dataclass(frozen=True)
class Stacked:
    """A parameter [X, ...] of experts: entry x consists of the rows of the tensors `parts[x]`, concatenated.

    Alternatively a checkpoint may have all experts in a tensor with the parameter's name. turns: that is what is saved,
    as [X, I, O] of a parameter [X, O, I]; both are read, as transformers does. whole: that tensor has this name
    instead, and is what is saved.
    """

    parts: tuple[tuple[str, ...], ...]
    turns: bool = False
    whole: str | None = None


@dataclass(frozen=True)
class Rearranged:
    """A parameter [X, O, ...] of gpt-oss's experts.

    alternates: outputs of gate and up alternate in the tensor, gate first; here all of gate's come first. turns: the
    tensor is [X, I, O], or mxfp4, [X, O, I], as "<tensor>_blocks" and "<tensor>_scales".
    """

    tensor: str
    alternates: bool
    turns: bool


Place = Source | Stacked | Rearranged


def renamed(place: Place, rename: Callable[[str], str]) -> Place:
    """The place with renamed tensors."""
    if isinstance(place, Stacked):
        parts = tuple(tuple(rename(name) for name in part) for part in place.parts)
        return replace(place, parts=parts, whole=place.whole and rename(place.whole))
    return replace(place, tensor=rename(place.tensor))


def same_names(config: ModelConfig) -> dict[str, Place]:
    """Every parameter is a tensor with the same name."""
    del config
    return {}


def same_name(name: str) -> str | None:
    """All tensors of the checkpoint belong to the model."""
    return name


def nothing(config: ModelConfig, name: str) -> bool:
    """The model uses all tensors."""
    del config, name
    return False


_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to; None: to none."""
    found = _LAYER.match(name)
    return None if found is None else int(found[1])


def further_layer(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to a layer after the last one, which predicts further tokens."""
    layer = layer_of(name)
    return layer is not None and layer >= config.num_layers


def mtp_modules(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of ERNIE's modules that predict further tokens."""
    del config
    return name.startswith("model.mtp_")


def shared_kv(config: ModelConfig, name: str) -> bool:
    """Whether a layer that reads an earlier one's keys and values has a tensor for its own (Gemma 4)."""
    layer = layer_of(name)
    of_kv = {"k_proj", "v_proj", "k_norm", "v_norm"}
    return layer is not None and layer not in config.kv_layers and bool(of_kv & {*name.split(".")})


def further_predictors(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of layers of Qwen3.5 and Qwen3-Next that predict further tokens."""
    del config
    return name.startswith("mtp.")


_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_OTHER_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    # Gemma 4
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    # Qwen3.5
    "model.visual.",
)


def text_part(name: str) -> str | None:
    """For a model of images and text: the tensor's name in the text-only model, None for other parts.

    transformers has written such checkpoints in two ways. A name of neither is unchanged, and reported as unknown.
    """
    for theirs, ours in _TEXT_PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None if name.startswith(_OTHER_PREFIXES) else name


def text_and_pictures(name: str) -> str | None:
    """The same, with the tower and its projector as `visual.`; None for a head of the tower that is not used."""
    name = name.removeprefix("model.") if name.startswith(_OTHER_PREFIXES) else name
    if name.startswith("multi_modal_projector."):
        return f"visual.{name}"
    if name.startswith("vision_tower."):
        inner = name.removeprefix("vision_tower.").removeprefix("vision_model.")
        return None if inner.startswith("head.") else f"visual.{inner}"
    return text_part(name)


def gemma4_name(name: str) -> str | None:
    """`text_part` with the vision tower and what projects its results as `visual.`."""
    for theirs, ours in (("model.vision_tower.", ""), ("model.embed_vision.", "embed_vision.")):
        if name.startswith(theirs):
            return f"visual.{ours}{name.removeprefix(theirs)}"
    return text_part(name)


_WITH_VISUAL_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model."}


def with_visual(name: str) -> str:
    """For a model whose encoder is beside the decoder, as in released checkpoints: `visual.` and `model.`.

    transformers 5 has both inside `model.`.
    """
    for theirs, ours in _WITH_VISUAL_PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def fused_projections(config: ModelConfig) -> dict[str, Place]:
    """Phi-3: rows of q, k and v in `qkv_proj`, of gate and up in `gate_up_proj`."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    parts = {
        "self_attn.q_proj": ("self_attn.qkv_proj", 0, q),
        "self_attn.k_proj": ("self_attn.qkv_proj", q, q + kv),
        "self_attn.v_proj": ("self_attn.qkv_proj", q + kv, q + 2 * kv),
        "mlp.gate_proj": ("mlp.gate_up_proj", 0, inner),
        "mlp.up_proj": ("mlp.gate_up_proj", inner, 2 * inner),
    }
    return {
        f"model.layers.{i}.{part}.weight": Source(f"model.layers.{i}.{fused}.weight", start, stop)
        for i in range(config.num_layers)
        for part, (fused, start, stop) in parts.items()
    }


def fused_gate_up(config: ModelConfig) -> dict[str, Place]:
    """GLM: rows of gate and up in `gate_up_proj`."""
    places = fused_projections(config)
    return {path: place for path, place in places.items() if ".mlp." in path}


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a checkpoint's tensors map to parameters: `tensor_name` as in `registry.Family`, and a `weight_map`."""

    tensor_name: Callable[[str], str | None]
    weight_map: dict[str, Place]


def separate_experts(config: ModelConfig) -> dict[str, Place]:
    """A tensor for each projection of each expert."""
    return _experts(config, "mlp", ("gate_proj", "up_proj"), "down_proj")


def turned_experts(config: ModelConfig) -> dict[str, Place]:
    """Qwen3-VL: all experts in one tensor, inputs before outputs. Tools that quantise them write the same as above."""
    return {
        path: replace(place, turns=True) if isinstance(place, Stacked) else place
        for path, place in separate_experts(config).items()
    }


def mixtral_experts(config: ModelConfig) -> dict[str, Place]:
    """The same with Mixtral's names."""
    assert config.experts is not None
    routers: dict[str, Place] = {
        f"model.layers.{i}.mlp.gate.weight": Source(
            f"model.layers.{i}.block_sparse_moe.gate.weight"
        )
        for i in config.experts.layers
    }
    return routers | _experts(config, "block_sparse_moe", ("w1", "w3"), "w2")


def gemma4_experts(config: ModelConfig) -> dict[str, Place]:
    """Router and experts are modules of the layer. Released checkpoints have all experts in one tensor, quantised ones
    have one for each projection of each.
    """
    if config.experts is None:
        return {}
    routers = {
        "gate.weight": "proj.weight",
        "gate.input_scale": "scale",
        "gate.per_expert_scale": "per_expert_scale",
    }
    places: dict[str, Place] = {}
    for i in config.experts.layers:
        layer = f"model.layers.{i}"
        for ours, theirs in routers.items():
            places[f"{layer}.moe.{ours}"] = Source(f"{layer}.router.{theirs}")
    for path, place in _experts(config, None, ("gate_proj", "up_proj"), "down_proj").items():
        assert isinstance(place, Stacked)
        whole = path.replace(".mlp.", ".")
        places[path.replace(".mlp.", ".moe.")] = replace(place, whole=whole)
    return places


_CORRECTION = "e_score_correction_bias"


def minimax_experts(config: ModelConfig) -> dict[str, Place]:
    """The same, with a correction of each router."""
    assert config.experts is not None
    return mixtral_experts(config) | {
        f"model.layers.{i}.mlp.gate.{_CORRECTION}": Source(
            f"model.layers.{i}.block_sparse_moe.{_CORRECTION}"
        )
        for i in config.experts.layers
    }


def ernie_experts(config: ModelConfig) -> dict[str, Place]:
    """A tensor for each projection of each expert, and corrections of routers beside these."""
    layers = () if config.experts is None else config.experts.layers
    return separate_experts(config) | {
        f"model.layers.{i}.mlp.gate.{_CORRECTION}": Source(
            f"model.layers.{i}.mlp.moe_statics.{_CORRECTION}"
        )
        for i in layers
    }


def ernie_name(name: str) -> str | None:
    """In transformers 5 corrections are in the router."""
    return name.replace(".gate.moe_statics.", ".gate.")


def minimax_name(name: str) -> str | None:
    """In transformers 5 the correction is beside the router."""
    return name.replace(f".mlp.{_CORRECTION}", f".mlp.gate.{_CORRECTION}")


def _experts(
    config: ModelConfig, module: str | None, gate_up: tuple[str, str], down: str
) -> dict[str, Place]:
    """module: that has the experts in the checkpoint; None: the layer."""
    if config.experts is None:
        return {}

    def stacked(layer: int, *projections: str) -> Stacked:
        assert config.experts is not None
        names = ".".join(filter(None, (f"model.layers.{layer}", module, "experts")))
        return Stacked(
            tuple(
                tuple(f"{names}.{expert}.{each}.weight" for each in projections)
                for expert in range(config.experts.num_experts)
            )
        )

    places: dict[str, Place] = {}
    for i in config.experts.layers:
        ours = f"model.layers.{i}.mlp.experts"
        places[f"{ours}.gate_up_proj"] = stacked(i, *gate_up)
        places[f"{ours}.down_proj"] = stacked(i, down)
    return places


_GRANITE = {
    "gate.weight": "router.layer",
    "experts.gate_up_proj": "input_linear",
    "experts.down_proj": "output_linear",
}


def granite_experts(config: ModelConfig) -> dict[str, Place]:
    """Granite has all experts in one tensor, under its own names."""
    assert config.experts is not None
    return {
        f"model.layers.{i}.mlp.{ours}": Source(f"model.layers.{i}.block_sparse_moe.{theirs}.weight")
        for i in config.experts.layers
        for ours, theirs in _GRANITE.items()
    }


def granite_name(name: str) -> str | None:
    """The names in transformers 5."""
    name = name.replace(".block_sparse_moe.router.weight", ".mlp.gate.weight")
    return name.replace(".block_sparse_moe.experts.", ".mlp.experts.")


def gpt_oss_experts(config: ModelConfig) -> dict[str, Place]:
    """gpt-oss has all experts in one tensor, in its own order and format."""
    assert config.experts is not None
    places: dict[str, Place] = {}
    for i in config.experts.layers:
        mlp = f"model.layers.{i}.mlp"
        for name in ("weight", "bias"):
            places[f"{mlp}.gate.{name}"] = Source(f"{mlp}.router.{name}")
        for name, alternates, turns in (
            ("gate_up_proj", True, True),
            ("gate_up_proj_bias", True, False),
            ("down_proj", False, True),
        ):
            path = f"{mlp}.experts.{name}"
            places[path] = Rearranged(path, alternates=alternates, turns=turns)
    return places
