"""Where parameters stand in a Hugging Face checkpoint, where that is not a tensor of their own name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxpage.models.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """Rows `start .. stop` of a checkpoint's tensor; all of it by default."""

    tensor: str
    start: int = 0
    stop: int | None = None


def same_names(config: ModelConfig) -> dict[str, Source]:
    """Every parameter has a tensor of its own, of its own name."""
    del config
    return {}


def same_name(name: str) -> str | None:
    """All tensors of the checkpoint belong to the model."""
    return name


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
)


def text_part(name: str) -> str | None:
    """Of a model for images and text: the name that the tensor has in the text model alone, None for the rest.

    transformers has written such checkpoints in two ways. A name of neither stays, and is reported as unknown.
    """
    for theirs, ours in _TEXT_PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None if name.startswith(_OTHER_PREFIXES) else name


def text_and_pictures(name: str) -> str | None:
    """The same with the tower and its projector as `visual.`; a head of the tower that nothing uses is None."""
    name = name.removeprefix("model.") if name.startswith(_OTHER_PREFIXES) else name
    if name.startswith("multi_modal_projector."):
        return f"visual.{name}"
    if name.startswith("vision_tower."):
        inner = name.removeprefix("vision_tower.").removeprefix("vision_model.")
        return None if inner.startswith("head.") else f"visual.{inner}"
    return text_part(name)


_WITH_VISUAL_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model."}


def with_visual(name: str) -> str:
    """Of a model whose encoder stands beside the decoder, as in released checkpoints: `visual.` and `model.`.

    transformers 5 has both in its `model.`.
    """
    for theirs, ours in _WITH_VISUAL_PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def fused_projections(config: ModelConfig) -> dict[str, Source]:
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


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a checkpoint's tensors become parameters: `tensor_name` as in `registry.Family`, and `weight_map` made."""

    tensor_name: Callable[[str], str | None]
    weight_map: dict[str, Source]
