"""EAGLE-3 heads: one small decoder layer that guesses tokens from hidden states of the engine's model
(https://arxiv.org/abs/2503.01840; vLLM's `Eagle3LlamaForCausalLM`, SGLang's `LlamaForCausalLMEagle3`).

A head reads pairs: the embedding of a token, and the feature of the token before it. Features are hidden states of
several layers of the model, mapped to the head's size; where the model has not computed them, because the tokens are
guesses, the head's own output takes their place.

Letters: T tokens, E the head's model dim, N layers of the model that are read, M the model's model dim, D tokens that
the head knows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import EagleOptions, ModelConfig, decoder_config
from jaxpage.models.decoder import MLP, CausalLM, DecoderLayer, SelfAttention, hidden_norm
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.layers import Constant, Embedding, Linear, Normal, RMSNorm, param
from jaxpage.models.rope import Rotation

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_EMBEDDING, MAP = "embed_tokens.weight", "d2t"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class FirstLayer(nnx.Module):
    """A Llama layer whose attention reads embedding and feature side by side."""

    def __init__(self, config: ModelConfig):
        assert config.eagle is not None
        self._norm_before_residual = config.eagle.norm_before_residual
        self.input_layernorm = hidden_norm(RMSNorm, config)  # of embeddings
        self.hidden_norm = hidden_norm(RMSNorm, config)  # of features
        self.self_attn = SelfAttention(config, 0, RMSNorm, width=2 * config.hidden_size)
        self.post_attention_layernorm = hidden_norm(RMSNorm, config)
        self.mlp = MLP(config)

    def __call__(
        self, embeds: jax.Array, features: jax.Array, rotation: Rotation, attention: Attention
    ) -> jax.Array:
        """[T, E] of both [T, E]."""
        normed = self.hidden_norm(features)
        both = jnp.concatenate([self.input_layernorm(embeds), normed], axis=-1)
        x = normed if self._norm_before_residual else features
        x = x + self.self_attn(both, rotation, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleDecoder(nnx.Module):
    """The map from hidden states to features, the layers, the final norm, and the embedding if the head has its own."""

    def __init__(self, config: ModelConfig):
        eagle, init, size = config.eagle, Normal(config.initializer_range), config.hidden_size
        assert eagle is not None
        embedding = Embedding(config.vocab_size, size, init=init, dtype=config.dtype)
        self.embed_tokens = embedding if eagle.has_embedding else None
        shape, axes = (size, len(eagle.layers) * eagle.target_hidden_size), ("embed", "embed")
        mapping = Linear(shape, axes=axes, bias=False, init=init, dtype=config.dtype)
        # None: features are the model's last hidden states as they are.
        self.fc = mapping if eagle.layers else None
        norms = [_norm_of(eagle.target_hidden_size, config) for _ in eagle.layers]
        self.fc_norm = nnx.List(norms) if eagle.fc_norm else None
        self.input_norm = _norm_of(shape[1], config) if eagle.norm_before_fc else None
        later = [DecoderLayer(config, index) for index in range(1, config.num_layers)]
        self.layers = nnx.List([FirstLayer(config), *later])
        self.norm = hidden_norm(RMSNorm, config)


def _norm_of(size: int, config: ModelConfig) -> RMSNorm:
    return RMSNorm(size, axis="embed", eps=config.norm_eps, dtype=config.dtype)


class EagleHead(CausalLM):
    """The head of a checkpoint; abstract like other models. It is no model of its own: see `propose`."""

    def __init__(self, config: ModelConfig):
        eagle = config.eagle
        assert eagle is not None
        self._norms_output = eagle.norm_output
        self.config = config
        self.model = EagleDecoder(config)
        self.lm_head = Linear(
            (eagle.vocab_size, config.hidden_size),
            axes=("vocab", "embed"),
            bias=False,
            init=Normal(config.initializer_range),
            dtype=config.dtype,
        )
        # int32[D]: what to add to the number of a token of the head's for that of the model's.
        shape, axes = (eagle.vocab_size,), ("draft vocab",)
        offsets = param(shape, axes=axes, init=Constant(0), dtype=jnp.dtype(jnp.int32))
        self.d2t = offsets if eagle.has_map else None

    def features(self, hidden: jax.Array) -> jax.Array:
        """[T, E] of the model's hidden states [T, N * M], in the order of `EagleOptions.layers`."""
        model = self.model
        if model.fc is None:
            return hidden
        if model.input_norm is not None:
            hidden = model.input_norm(hidden)
        if model.fc_norm is not None:
            parts = jnp.split(hidden, len(model.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)]
            hidden = jnp.concatenate(normed, axis=-1)
        return model.fc(hidden)

    def propose(
        self, inputs: ForwardInput, features: jax.Array, embeds: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Hidden states [T, E] for `logits`, and the features [T, E] of the tokens that these choose.

        Each token of `inputs` stands at the position of the one before it, whose feature [T, E] it is paired with.
        embeds: [T, E] of the tokens in the model's embedding, for a head without its own.
        """
        model = self.model
        if model.embed_tokens is not None:
            embeds = model.embed_tokens(inputs.token_ids)
        assert embeds is not None, "this head has no embedding"
        rotation = inputs.rotation(self.config.ropes[0], features.dtype)
        layers: list[Any] = list(model.layers)
        first, *later = layers
        x = first(embeds, features, rotation, inputs.attention)
        for layer in later:
            x = layer(x, rotation, inputs.attention)
        hidden = model.norm(x)
        return hidden, hidden if self._norms_output else x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., E] -> float32[..., V]; -inf of tokens that the head does not know."""
        logits = self.lm_head.product(hidden)
        if self.d2t is None:
            return logits
        number = jnp.arange(self.d2t.shape[0], dtype=jnp.int32)
        # int32[V]: the head's number of each token of the model; D: it does not know it.
        own = jnp.full(self.config.vocab_size, number.size, jnp.int32)
        own = own.at[number + self.d2t[...]].set(number, unique_indices=True, mode="drop")
        return jnp.take(logits, own, axis=-1, mode="fill", fill_value=-jnp.inf)


def eagle3_config(
    hf: PretrainedConfig,
    target: ModelConfig,
    *,
    tensors: Collection[str] | None,
    dtype: Any,
    max_model_len: int,
) -> ModelConfig:
    """The description of a head for the model `target`, from its config.json as transformers reads it.

    tensors: the names in its checkpoint; None if there is none, and a head without an embedding of its own is assumed,
    as most are. Raises ValueError for what is not supported or does not fit the model.
    """
    architecture = (hf.architectures or ["?"])[0]
    layers = _layers(hf, target)
    size = getattr(hf, "target_hidden_size", None) or hf.hidden_size
    if type(size) is not int:
        raise ValueError(
            f"{architecture}: target_hidden_size must be an integer in config.json, got {size!r}"
        )
    if size != target.hidden_size:
        raise ValueError(
            f"{architecture} is for a model with hidden states of {size:,} values, and those of "
            f"{target.architecture} have {target.hidden_size:,}; take the head that was trained for this model"
        )
    if not layers and size != hf.hidden_size:
        raise ValueError(
            f"{architecture} has a hidden_size of {hf.hidden_size:,} and takes the model's last hidden states, of "
            f"{size:,} values, as they are; both must be equal"
        )
    names = {name.removeprefix("model.") for name in tensors or ()}
    draft_vocab_size = getattr(hf, "draft_vocab_size", None)
    draft_vocab_size = hf.vocab_size if draft_vocab_size is None else draft_vocab_size
    if type(draft_vocab_size) is not int or not 1 <= draft_vocab_size <= hf.vocab_size:
        raise ValueError(
            f"{architecture}: draft_vocab_size is {draft_vocab_size!r} in config.json; it must be an integer in "
            f"1..{hf.vocab_size}, the vocab_size"
        )
    has_embedding = _EMBEDDING in names or (tensors is None and hf.hidden_size != size)
    if not has_embedding and hf.hidden_size != target.hidden_size:
        raise ValueError(
            f"{architecture} has no embedding of its own, and that of {target.architecture} has {target.hidden_size:,} "
            f"values for a token where the head takes {hf.hidden_size:,}"
        )
    return decoder_config(
        hf,
        dtype=dtype,
        max_model_len=max_model_len,
        tie_word_embeddings=False,
        qk_norm=hf.model_type == "qwen3",
        eagle=EagleOptions(
            layers=layers,
            target_hidden_size=size,
            vocab_size=draft_vocab_size,
            **{name: bool(getattr(hf, name, False)) for name in _NORMS},
            has_map=MAP in names or draft_vocab_size != hf.vocab_size,
            has_embedding=has_embedding,
        ),
    )


def _layers(hf: PretrainedConfig, target: ModelConfig) -> tuple[int, ...]:
    """The layers of the model whose inputs the head reads; `num_layers` is the output of the last. (): its final
    hidden states.

    vLLM's field counts inputs, SGLang's `eagle_config` outputs of layers. The default is that of both.
    """
    number = target.num_layers
    options = getattr(hf, "eagle_config", None) or {}
    if not isinstance(options, dict):
        raise ValueError(f"eagle_config must be an object in config.json, got {options!r}")
    if not options.get("use_aux_hidden_state", True):
        return ()
    found, offset = getattr(hf, _LAYER_IDS, None), 0
    if not found:
        found, offset = options.get(_LAYER_IDS), 1
    if found and not (isinstance(found, list) and all(type(each) is int for each in found)):
        raise ValueError(f"{_LAYER_IDS} must be a list of integers in config.json, got {found!r}")
    ids = tuple(each + offset for each in found or ())
    ids = ids or (2, number // 2, number - 3)
    if any(not 0 <= each <= number for each in ids) or len({*ids}) < len(ids):
        raise ValueError(
            f"the head reads the inputs of layers {', '.join(map(str, ids))} of a model that has layers 0 .. "
            f"{number - 1}; they must be different ones of these, or {number} for the output of the last: check "
            f"{_LAYER_IDS} in config.json"
        )
    return ids


def eagle3_name(name: str) -> str | None:
    """Our name for a tensor of a head; None for the one that says which tokens of the model the head knows."""
    name = name.removeprefix("model.")
    if name == "t2d":
        return None
    if name == MAP or name.startswith("lm_head."):
        return name
    return "model." + name.replace("midlayer.", "layers.0.")


def check_map(offsets: np.ndarray, *, vocab_size: int) -> None:
    """Raises ValueError unless d2t, int[D], maps to different tokens of a vocabulary."""
    if offsets.ndim != 1:
        raise ValueError(
            f"d2t has shape {offsets.shape} in the checkpoint, and must have one number for each token of the head"
        )
    targets = offsets.astype(np.int64) + np.arange(len(offsets))
    wrong = targets[(targets < 0) | (targets >= vocab_size)]
    if wrong.size:
        raise ValueError(
            f"d2t maps a token to {wrong[0]}, and the vocabulary has {vocab_size:,} tokens; take the head that was "
            "trained for this model"
        )
    known, counts = np.unique(targets, return_counts=True)
    if counts.size and counts.max() > 1:
        raise ValueError(
            f"d2t maps {counts.max()} tokens to token {known[counts.argmax()]}; the checkpoint is damaged"
        )
