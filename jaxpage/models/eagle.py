"""Heads of the first EAGLE: a decoder layer that guesses the next hidden state of the engine's model, whose own LM head
turns it into a token (https://arxiv.org/abs/2401.15077; vLLM's `EagleLlamaForCausalLM`).

Like those of EAGLE-3 (see `models.eagle3`) they read pairs of an embedding and a feature; features are the model's last
hidden states, and where there are none yet, the head's own guesses at them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import EagleOptions, ModelConfig, decoder_config
from jaxpage.models.decoder import CausalLM, DecoderLayer
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.layers import Linear, Normal
from jaxpage.models.recurrence import Recurrence
from jaxpage.models.rope import Rotation

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class _FirstLayer(DecoderLayer):
    """Without a norm before attention."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, 0)
        del self.input_layernorm

    def first_half(
        self,
        x: jax.Array,
        rotation: Rotation,
        attention: Attention,
        recurrence: Recurrence | None,
    ) -> jax.Array:
        del recurrence
        return self.self_attn(x, rotation, attention)


def pair_projection(config: ModelConfig, *, bias: bool = False) -> Linear:
    """From a pair, both [T, E] side by side, to the input of a layer."""
    size = config.hidden_size
    return Linear(
        (size, 2 * size),
        axes=("embed", "embed"),
        bias=bias,
        init=Normal(config.initializer_range),
        dtype=config.dtype,
    )


class _Decoder(nnx.Module):
    def __init__(self, config: ModelConfig):
        assert config.eagle is not None
        self.config = config
        self.fc = pair_projection(config, bias=config.eagle.has_bias)
        later = [DecoderLayer(config, index) for index in range(1, config.num_layers)]
        self.layers = nnx.List([_FirstLayer(config), *later])

    def __call__(self, inputs: ForwardInput, features: jax.Array, embeds: jax.Array) -> jax.Array:
        rotation = inputs.rotation(self.config.ropes[0], features.dtype)
        x = self.fc(jnp.concatenate([embeds, features], axis=-1))
        layers: list[Any] = list(self.layers)
        for layer in layers:
            x = layer(x, rotation, inputs.attention)
        return x


class FirstEagleHead(CausalLM):
    """The head of a checkpoint; abstract like other models. Embedding and LM head are those of the engine's model."""

    def __init__(self, config: ModelConfig, *, decoder: Callable[[ModelConfig], Any] = _Decoder):
        """decoder: makes what is called with inputs, features and embeddings, and returns hidden states [T, E]."""
        self.config = config
        self.model = decoder(config)
        self.lm_head = None

    def features(self, hidden: jax.Array) -> jax.Array:
        """The model's last hidden states [T, E], as they are."""
        return hidden

    def propose(
        self, inputs: ForwardInput, features: jax.Array, embeds: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """As `eagle3.EagleHead.propose`; hidden states and features are the same."""
        assert embeds is not None
        x = self.model(inputs, features, embeds)
        return x, x


def eagle_config(
    hf: PretrainedConfig,
    target: ModelConfig,
    *,
    tensors: Collection[str] | None,
    dtype: Any,
    max_model_len: int,
) -> ModelConfig:
    """The description of a head for the model `target`, see `eagle3.eagle3_config`."""
    architecture = (hf.architectures or ["?"])[0]
    if getattr(hf, "add_para_norm", None):
        raise ValueError(
            f"{architecture}: add_para_norm is set in config.json, and norms of what a head reads are not supported"
        )
    if hf.hidden_size != target.hidden_size:
        raise ValueError(
            f"{architecture} is for a model with hidden states of {hf.hidden_size:,} values, and those of "
            f"{target.architecture} have {target.hidden_size:,}; take the head that was trained for this model"
        )
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        tie_word_embeddings=False,
        eagle=EagleOptions(
            layers=(),
            target_hidden_size=hf.hidden_size,
            has_head=False,
            has_bias="fc.bias" in (tensors or ()),
        ),
    )


def eagle_name(name: str) -> str | None:
    """Our name for a tensor of a head; None for copies of the model's."""
    name = name.removeprefix("model.")
    is_copy = name.startswith(("embed_tokens.", "lm_head."))
    return None if is_copy else f"model.{name}"
