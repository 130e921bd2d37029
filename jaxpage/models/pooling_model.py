"""Models with one output per text: tokens to hidden states, pooling to one vector per text, and a head.

Knows encoders and decoders as modules. Must not know checkpoints, prompts or activations: it returns raw numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.decoder import Decoder
from jaxpage.models.encoder import Encoder, LayerNorm
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, Linear, Normal
from jaxpage.models.modernbert import ModernBert
from jaxpage.models.token_batch import RowAttention, TokenBatch

Does = Literal["embed", "classify", "token_classify"]
PoolingType = Literal["CLS", "LAST", "MEAN"]


@dataclass(frozen=True, kw_only=True)
class PoolingModelConfig:
    """The description of a pooling model, except its layers."""

    architecture: str
    does: Does
    pooling: PoolingType  # which vector of a text is the head's input
    vocab_size: int
    hidden_size: int
    dtype: jnp.dtype
    longest: int  # most tokens of a text
    num_labels: int  # outputs of the head; 0: no head
    is_causal: bool
    layers: str  # the description of the encoder or decoder, to compare programs
    initializer_range: float = 0.02


class TanhHead(nnx.Module):
    """out(tanh(dense(x))): BERT and RoBERTa."""

    def __init__(self, config: PoolingModelConfig):
        size = config.hidden_size
        self.dense, self.out = _linear(config, size), _linear(config, config.num_labels)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.dense(x)))


class NormedHead(nnx.Module):
    """out(norm(activation(dense(x)))): ModernBERT."""

    def __init__(
        self,
        config: PoolingModelConfig,
        *,
        activation: str,
        eps: float,
        bias: bool,
        norm_bias: bool,
    ):
        self.activation = activation
        size = config.hidden_size
        self.dense = _linear(config, size, bias=bias)
        self.norm = LayerNorm(size, eps=eps, bias=norm_bias, dtype=jnp.dtype(jnp.float32))
        self.out = _linear(config, config.num_labels)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.norm(ACTIVATION_FUNCTIONS[self.activation](self.dense(x))))


class LinearHead(nnx.Module):
    """out(x): token classifiers, and decoders."""

    def __init__(self, config: PoolingModelConfig, *, bias: bool):
        self.out = _linear(config, config.num_labels, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


class RewardHead(nnx.Module):
    """out(relu(dense(x))): reward models of the Qwen2 family."""

    def __init__(self, config: PoolingModelConfig):
        self.dense = _linear(config, config.hidden_size)
        self.out = _linear(config, config.num_labels)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.relu(self.dense(x)))


Head = TanhHead | NormedHead | LinearHead | RewardHead


class Projection(nnx.Module):
    """A Dense module of sentence-transformers: activation(linear(x))."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool, activation: str | None):
        self.activation = activation  # "tanh"; None: none
        self.linear = _float32_linear(size_in, size_out, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.linear(x)
        return jnp.tanh(x) if self.activation == "tanh" else x


def _linear(config: PoolingModelConfig, size_out: int, *, bias: bool = True) -> Linear:
    return _float32_linear(config.hidden_size, size_out, bias=bias, std=config.initializer_range)


def _float32_linear(size_in: int, size_out: int, *, bias: bool, std: float = 0.02) -> Linear:
    """Heads are float32 whatever the model's dtype: they cost nothing, and scores are close to each other."""
    return Linear(
        (size_out, size_in),
        axes=("embed", "embed"),
        bias=bias,
        init=Normal(std),
        dtype=jnp.dtype(jnp.float32),
    )


class DecoderStates(nnx.Module):
    """A decoder's hidden states for whole texts, without a KV cache."""

    def __init__(self, decoder: Decoder, *, is_causal: bool):
        self.decoder, self.is_causal = decoder, is_causal

    def __call__(self, batch: TokenBatch) -> jax.Array:
        """[B, L, E] in the model's dtype, after the final norm."""
        attention = RowAttention(batch, causal=self.is_causal)
        return self.decoder(
            ForwardInput(token_ids=batch.token_ids, positions=batch.positions, attention=attention)
        )

    def of_chunk(self, chunk: ForwardInput) -> jax.Array:
        """[C, E] of some tokens of one text; their attention sees the keys of earlier tokens."""
        return self.decoder(chunk)


Layers = Encoder | ModernBert | DecoderStates


class PoolingModel(nnx.Module):
    """Layers, pooling, projections and head; without a head it returns embeddings."""

    def __init__(self, config: PoolingModelConfig, layers: Layers, head: Head | None):
        self.config = config
        self.layers = layers
        self.head = head
        self.projections: nnx.List[Projection] = nnx.List([])

    def of_texts(self, batch: TokenBatch, starts: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32[S, D]: a raw vector for each text.

        `starts`, `lengths`: int32[S], the first token of each text among the B * L of the batch, and its number of
        tokens; a text of no tokens is padding with arbitrary results.
        """
        hidden = self.layers(batch)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        return self.finished(_pool(hidden, starts, lengths, self.config.pooling))

    def of_tokens(self, batch: TokenBatch) -> jax.Array:
        """float32[B, L, D]: a raw vector for each token."""
        return self.finished(self.layers(batch).astype(jnp.float32))

    @property
    def decoder_states(self) -> DecoderStates:
        """The layers of a model that is a decoder."""
        assert isinstance(self.layers, DecoderStates), f"{self.config.architecture} is no decoder"
        return self.layers

    def states_of_chunk(self, chunk: ForwardInput) -> jax.Array:
        """float32[C, E]: hidden states of some tokens of one text, for causal models."""
        return self.decoder_states.of_chunk(chunk).astype(jnp.float32)

    def share_of_chunk(
        self, states: jax.Array, chunk: ForwardInput, *, length: jax.Array
    ) -> jax.Array:
        """float32[E]: the share of a chunk in the pooled vector of a text of `length` tokens, int32[].

        `states`: float32[C, E] of the chunk. The shares of all chunks add up to the vector.
        """
        counts = chunk.is_token
        assert counts is not None
        if self.config.pooling != "MEAN":
            counts &= chunk.positions == (0 if self.config.pooling == "CLS" else length - 1)
        share = jnp.where(counts[:, None], states, 0).sum(axis=0)
        return share / length.astype(jnp.float32) if self.config.pooling == "MEAN" else share

    def finished(self, x: jax.Array) -> jax.Array:
        """Raw numbers, float32[..., D], of pooled vectors or hidden states, float32[..., E]."""
        for projection in self.projections:
            x = projection(x)
        return x if self.head is None else self.head(x)


def _pool(hidden: jax.Array, starts: jax.Array, lengths: jax.Array, kind: PoolingType) -> jax.Array:
    """[T, E] -> float32[S, E]"""
    if kind == "CLS":
        return hidden.at[starts].get(mode="clip").astype(jnp.float32)
    if kind == "LAST":
        last = starts + jnp.maximum(lengths, 1) - 1
        return hidden.at[last].get(mode="clip").astype(jnp.float32)
    tokens = jnp.arange(hidden.shape[0], dtype=jnp.int32)[None, :]
    first = starts[:, None]
    inside = (tokens >= first) & (tokens < first + lengths[:, None])
    sums = jnp.matmul(inside.astype(jnp.float32), hidden.astype(jnp.float32), precision="highest")
    return sums / jnp.maximum(lengths, 1).astype(jnp.float32)[:, None]
