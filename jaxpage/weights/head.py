"""The abstract EAGLE head or MTP layer of a checkpoint.

Knows config.json, which tensors there are, and the tensor that says which tokens the head knows. Reads no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from jaxpage.eagle_config import HEADS, LAYERS
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.eagle import FirstEagleHead, eagle_config
from jaxpage.models.eagle3 import MAP, EagleHead, check_map, eagle3_config, eagle3_name
from jaxpage.models.mtp_families import mtp_family
from jaxpage.weights.abstract import with_own_quantization
from jaxpage.weights.load import quantization_config_of
from jaxpage.weights.orbax import find_tree
from jaxpage.weights.safetensors import INDEX, SINGLE, StoredTensor, open_checkpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from jaxpage.config import ResolvedConfig


def abstract_head(
    hf_config: PretrainedConfig, config: ResolvedConfig, target: ModelConfig, method: str
) -> CausalLM:
    """The head in the folder `config.model` for the model `target`. Raises ValueError for what is no head of this
    method, is not supported, or does not fit the model.
    """
    architecture = (hf_config.architectures or ["none"])[0]
    # In the heads of EAGLE's authors the architecture may be that of a whole model.
    is_head = HEADS.get(architecture) == method or (
        architecture not in HEADS and (method == "eagle" or hasattr(hf_config, "draft_vocab_size"))
    )
    layers = LAYERS if method == "eagle3" else ("llama",)
    if not is_head or hf_config.model_type not in layers:
        known = ", ".join(name for name, each in HEADS.items() if each == method)
        raise ValueError(
            f"architecture {architecture} (model_type {hf_config.model_type!r}) is no head of method {method!r}; "
            f"supported are {known}, of model_type {' or '.join(layers)}"
        )
    if quantization_config_of(hf_config):
        raise ValueError(
            f"{architecture} has a quantization_config, and heads are read as floats only; take one in bfloat16"
        )
    tensors = _tensors(config.model)
    sizes: dict[str, Any] = {"dtype": config.dtype, "max_model_len": config.max_model_len}
    if method == "eagle":
        return FirstEagleHead(eagle_config(hf_config, target, tensors=tensors, **sizes))
    head = eagle3_config(hf_config, target, tensors=tensors, **sizes)
    for name, tensor in (tensors or {}).items():
        if eagle3_name(name) == MAP:
            check_map(tensor.read(), vocab_size=min(head.vocab_size, target.vocab_size))
    return EagleHead(head)


def abstract_mtp_layer(
    hf_config: PretrainedConfig, config: ResolvedConfig, target: ModelConfig, mesh: Mesh | None
) -> tuple[CausalLM, str | None]:
    """The MTP layer in the folder `config.model` for the model `target`, quantised as it is there, and by which method.

    Raises ValueError for a checkpoint without one, and for what is not supported.
    """
    family = mtp_family(target)
    head = family.head(family.config(hf_config, target, tensors=_tensors(config.model)))
    if find_tree(config.model) is not None:
        raise ValueError(
            f"{config.model} is an Orbax checkpoint, and MTP layers are read from safetensors only; give a checkpoint "
            "in safetensors as model of speculative_config"
        )
    _, quantization, _ = with_own_quantization(head, hf_config, config, mesh)
    return head, quantization


def _tensors(folder: str) -> dict[str, StoredTensor] | None:
    """By name; None if the folder has no weights."""
    if not any(Path(folder, name).is_file() for name in (SINGLE, INDEX)):
        return None
    return open_checkpoint(folder)
