"""What a family is: an entry of `registry.REGISTRY`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxpage.models.config import ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM
from jaxpage.models.sources import Place, nothing, same_name, same_names
from jaxpage.pictures.border import PictureProcessor


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build the models with one architecture name."""

    config_from_hf: Callable[..., ModelConfig] = decoder_config  # (hf, *, dtype, max_model_len)
    module: Callable[[ModelConfig], CausalLM] = CausalLM
    # Parameters that are not a tensor with the same name: path -> place in the checkpoint.
    weight_map: Callable[[ModelConfig], dict[str, Place]] = same_names
    # A tensor's name in the checkpoint -> ours; None: it belongs to an unsupported part.
    tensor_name: Callable[[str], str | None] = same_name
    # Whether a tensor, under our name, is of a part of the text model that computes nothing.
    is_idle: Callable[[ModelConfig, str], bool] = nothing
    # For families that take pictures, creates the processor: (hf, settings, *, tokenizer, options). Their ModelConfig
    # has a `vision`, their model a `visual`.
    processor: Callable[..., PictureProcessor] | None = None
    # The same checkpoints without their encoder, for engines without pictures.
    text_only: Family | None = None
