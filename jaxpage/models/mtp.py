"""Multi-token prediction: the layer behind the last one of a checkpoint, which guesses the token after the next one
(DeepSeek-V3, arXiv:2412.19437, section 2.2; vLLM's `DeepSeekMTP`, SGLang's `DeepseekModelNextN`). Which families have
one says `mtp_families`; those of Qwen are in `qwen_mtp`.

Like heads of EAGLE (see `models.eagle`) it reads pairs of an embedding and a hidden state. The model's are taken after
its final norm. Where there are none yet, the layer's own take their place, after the norm of its `shared_head`, as its
LM head reads them; so do SGLang and vLLM, but for vLLM's `Glm4MoeMTP`, which takes them before it. Embedding and LM
head are the model's; checkpoints have copies of both in the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import EagleOptions, ModelConfig
from jaxpage.models.decoder import DecoderLayer, hidden_norm
from jaxpage.models.eagle import FirstEagleHead, pair_projection
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.layers import RMSNorm
from jaxpage.models.sources import Place, layer_of, separate_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COPIES = ("embed_tokens.", "shared_head.head.")


class _SharedHead(nnx.Module):
    """The norm before the LM head."""

    def __init__(self, config: ModelConfig):
        self.norm = hidden_norm(RMSNorm, config)


class MTPLayer(DecoderLayer):
    """A layer of the model with experts, between a map of pairs to its inputs and a norm."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, 0)
        self.rope = config.ropes[0]
        self.enorm = hidden_norm(RMSNorm, config)  # of embeddings
        self.hnorm = hidden_norm(RMSNorm, config)  # of hidden states
        self.eh_proj = pair_projection(config)
        self.shared_head = _SharedHead(config)

    def guess(self, inputs: ForwardInput, hidden: jax.Array, embeds: jax.Array) -> jax.Array:
        """Hidden states [T, E] of pairs of a hidden state and an embedding, both [T, E]. As in vLLM, the first pair of
        a sequence has no embedding.
        """
        embeds = jnp.where(inputs.positions[:, None] == 0, 0, embeds)
        rotation = inputs.rotation(self.rope, hidden.dtype)
        x = self.eh_proj(jnp.concatenate([self.enorm(embeds), self.hnorm(hidden)], axis=-1))
        return self.shared_head.norm(self(x, rotation, inputs.attention, inputs.is_token))


class _Decoder(nnx.Module):
    def __init__(self, config: ModelConfig, layer: Callable[[ModelConfig], Any]):
        assert config.eagle is not None
        # By its number, so that parameters have their names in the checkpoint, which its quantization_config knows.
        self.layers = nnx.Dict({str(config.eagle.mtp_layer): layer(config)})

    def __call__(self, inputs: ForwardInput, features: jax.Array, embeds: jax.Array) -> jax.Array:
        (layer,) = self.layers.values()
        return layer.guess(inputs, features, embeds)


def mtp_head(
    config: ModelConfig, *, layer: Callable[[ModelConfig], Any] = MTPLayer
) -> FirstEagleHead:
    """The MTP layer of a checkpoint as a head. layer: makes it, with a method like `MTPLayer.guess`."""
    return FirstEagleHead(config, decoder=partial(_Decoder, layer=layer))


def mtp_config(
    hf: PretrainedConfig, target: ModelConfig, *, tensors: Collection[str] | None
) -> ModelConfig:
    """The description of the MTP layer of a checkpoint with the config.json `hf`, for the model `target`.

    tensors: the names in the checkpoint; None if there is none. Of several such layers it is the first, as in vLLM.
    Raises ValueError if there is none, or if it is of another model.
    """
    if target.experts is None:
        raise ValueError(
            f'method "mtp" is for models with experts, and the model is {target.architecture} without: check '
            "first_k_dense_replace in config.json"
        )
    check_same_model(hf, hf, target)
    # Of a norm, which no format of quantised weights renames.
    name = f"model.layers.{target.num_layers}.enorm.weight"
    option = "num_nextn_predict_layers"
    check_layer(target, (option, getattr(hf, option, None)), name, tensors)
    return replace(
        target,
        num_layers=1,
        windows=target.windows[-1:],
        ropes=target.ropes[-1:],
        experts=replace(target.experts, layers=(0,)),
        eagle=EagleOptions(
            layers=(),
            target_hidden_size=target.hidden_size,
            has_head=False,
            mtp_layer=target.num_layers,
        ),
    )


def check_same_model(hf: PretrainedConfig, text: PretrainedConfig, target: ModelConfig) -> None:
    """Raise ValueError if the checkpoint with the config.json `hf`, whose part about text is `text`, is of another
    model than `target`.
    """
    architecture = (hf.architectures or ["?"])[0]
    sizes = tuple(getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size"))
    wanted = target.num_layers, target.hidden_size
    if (_without_kind(architecture), sizes) != (_without_kind(target.architecture), wanted):
        raise ValueError(
            f"{architecture} with {sizes[0]} layers of {sizes[1]} is another model than {target.architecture} with "
            f"{wanted[0]} of {wanted[1]}, and has no MTP layer for it; leave model out to take the layer of the "
            "model's own checkpoint"
        )


def _without_kind(architecture: str) -> str:
    """The same for checkpoints with pictures and their text parts alone."""
    return architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")


def check_layer(
    target: ModelConfig,
    given: tuple[str, object] | None,
    name: str,
    tensors: Collection[str] | None,
) -> None:
    """Raise ValueError if a checkpoint of the model has no MTP layer. given: the option in config.json that says how
    many it has, and its value, if there is one; name: of a tensor of the layer; tensors: the names of all, None if
    there are none.
    """
    what, although = f"the checkpoint of {target.architecture} has no MTP layer", ""
    if given is not None:
        option, number = given
        if type(number) is not int or number < 1:
            raise ValueError(f"{what}: {option} is {number!r} in config.json")
        although = f", although {option} is {number} in config.json"
    if tensors is not None and name not in tensors:
        raise ValueError(
            f"{what}: it lacks {name}{although}. Some converters drop the layer: take the original, as model of "
            "speculative_config too"
        )


def mtp_name(config: ModelConfig, name: str) -> str | None:
    """The name of a tensor, which is ours too, if it is of the MTP layer and no copy of the model's; else None."""
    assert config.eagle is not None
    layer = config.eagle.mtp_layer
    inner = name.removeprefix(f"model.layers.{layer}.")
    return None if layer_of(name) != layer or inner.startswith(_COPIES) else name


def mtp_experts(config: ModelConfig) -> dict[str, Place]:
    """Where the checkpoint has the layer's experts."""
    assert config.eagle is not None and config.eagle.mtp_layer is not None
    assert config.experts is not None
    experts = replace(config.experts, layers=(config.eagle.mtp_layer,))
    return separate_experts(replace(config, experts=experts))
