"""The abstract EAGLE-3 head of a checkpoint.

Knows config.json, which tensors there are, and the tensor that says which tokens the head knows. Reads no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxpage.eagle_config import EAGLE3_HEADS, LAYERS
from jaxpage.models.config import ModelConfig
from jaxpage.models.eagle3 import MAP, EagleHead, check_map, eagle3_config
from jaxpage.weights.load import quantization_config_of
from jaxpage.weights.safetensors import INDEX, SINGLE, StoredTensor, open_checkpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from jaxpage.config import ResolvedConfig


def abstract_head(
    hf_config: PretrainedConfig, config: ResolvedConfig, target: ModelConfig
) -> EagleHead:
    """The head in the folder `config.model` for the model `target`. Raises ValueError for what is no head, is not
    supported, or does not fit the model.
    """
    architecture = (hf_config.architectures or ["none"])[0]
    # The heads of EAGLE's authors have the name of a model.
    is_head = architecture in EAGLE3_HEADS or getattr(hf_config, "draft_vocab_size", None)
    if not is_head or hf_config.model_type not in LAYERS:
        raise ValueError(
            f"architecture {architecture} (model_type {hf_config.model_type!r}) is no EAGLE-3 head; supported are "
            f"{', '.join(EAGLE3_HEADS)}, of model_type {' or '.join(LAYERS)}"
        )
    if quantization_config_of(hf_config):
        raise ValueError(
            f"{architecture} has a quantization_config, and heads are read as floats only; take one in bfloat16"
        )
    tensors = _tensors(config.model)
    head = eagle3_config(
        hf_config,
        target,
        tensors=tensors,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
    )
    if tensors is not None and MAP in tensors:
        offsets = tensors[MAP].read()
        check_map(offsets, vocab_size=min(head.vocab_size, target.vocab_size))
    return EagleHead(head)


def _tensors(folder: str) -> dict[str, StoredTensor] | None:
    """By name; None if the folder has no weights."""
    if not any(Path(folder, name).is_file() for name in (SINGLE, INDEX)):
        return None
    return open_checkpoint(folder)
