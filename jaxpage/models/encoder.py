"""Encoders with learned positions: BERT, RoBERTa and XLM-RoBERTa, which differ only in data.

Attention is bidirectional over the whole text, without a cache. Knows transformers' names of their configs. Must not
know checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.config import activation_of
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, Constant, Embedding, Linear, Normal, param
from jaxpage.models.token_batch import RowAttention, TokenBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """An encoder of the BERT family."""

    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_positions: int  # rows of the position table
    first_position: int  # row of a text's first token
    num_types: int  # rows of the token type table
    activation: str
    norm_eps: float
    dtype: jnp.dtype
    initializer_range: float = 0.02  # standard deviation of dummy weights

    @property
    def longest(self) -> int:
        """Most tokens of a text."""
        return self.num_positions - self.first_position


class LayerNorm(nnx.Module):
    """Mean 0 and variance 1 over the last axis, computed in float32, times weight plus bias."""

    def __init__(self, size: int, *, eps: float, bias: bool, dtype: jnp.dtype):
        self.eps = eps
        self.weight = param((size,), axes=("embed",), init=Constant(1.0), dtype=dtype)
        offset = param((size,), axes=("embed",), init=Constant(0.0), dtype=dtype)
        self.bias = offset if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        centred = wide - mean
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps)
        y = y * _row(self.weight[...], y)
        if self.bias is not None:
            y = y + _row(self.bias[...], y)
        return y.astype(x.dtype)


def _row(vector: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.expand_dims(vector.astype(jnp.float32), range(x.ndim - 1))


class Embeddings(nnx.Module):
    """Embeddings of tokens, positions and types, added and normed."""

    def __init__(self, config: EncoderConfig):
        self.config = config

        def table(size: int) -> Embedding:
            init = Normal(config.initializer_range)
            return Embedding(size, config.hidden_size, init=init, dtype=config.dtype)

        self.word_embeddings = table(config.vocab_size)
        self.position_embeddings = table(config.num_positions)
        self.token_type_embeddings = table(config.num_types)
        self.norm = LayerNorm(
            config.hidden_size, eps=config.norm_eps, bias=True, dtype=config.dtype
        )

    def __call__(self, batch: TokenBatch) -> jax.Array:
        x = self.word_embeddings(batch.token_ids) + self.token_type_embeddings(batch.type_ids)
        return self.norm(x + self.position_embeddings(batch.positions + self.config.first_position))


class EncoderLayer(nnx.Module):
    """Attention and MLP, each added to its input and then normed."""

    def __init__(self, config: EncoderConfig, index: int):
        self.config, self.index = config, index
        embed, inner = config.hidden_size, config.intermediate_size

        def linear(size_in: int, size_out: int, axes: tuple[str, str]) -> Linear:
            init = Normal(config.initializer_range)
            return Linear((size_out, size_in), axes=axes, bias=True, init=init, dtype=config.dtype)

        self.query = linear(embed, embed, ("heads", "embed"))
        self.key = linear(embed, embed, ("heads", "embed"))
        self.value = linear(embed, embed, ("heads", "embed"))
        self.attention_output = linear(embed, embed, ("embed", "heads"))
        self.attention_norm = LayerNorm(embed, eps=config.norm_eps, bias=True, dtype=config.dtype)
        self.up = linear(embed, inner, ("mlp", "embed"))
        self.down = linear(inner, embed, ("embed", "mlp"))
        self.output_norm = LayerNorm(embed, eps=config.norm_eps, bias=True, dtype=config.dtype)

    def __call__(self, x: jax.Array, attention: RowAttention) -> jax.Array:
        config = self.config
        head_dim = config.hidden_size // config.num_heads
        q, k, v = (
            part(x).reshape(*x.shape[:-1], config.num_heads, head_dim)
            for part in (self.query, self.key, self.value)
        )
        out = attention(self.index, q, k, v, scale=head_dim**-0.5, window=None, soft_cap=None)
        x = self.attention_norm(x + self.attention_output(out.reshape(x.shape)))
        # In float32: XLA:CPU would round within a 16-bit function, which is slower too.
        inner = ACTIVATION_FUNCTIONS[config.activation](self.up(x).astype(jnp.float32))
        return self.output_norm(x + self.down(inner.astype(x.dtype)))


class Encoder(nnx.Module):
    """Embeddings and layers."""

    def __init__(self, config: EncoderConfig):
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nnx.List([EncoderLayer(config, i) for i in range(config.num_layers)])

    def __call__(self, batch: TokenBatch) -> jax.Array:
        """[B, L, E] in the model's dtype."""
        attention = RowAttention(batch, causal=False)
        x = self.embeddings(batch)
        for layer in self.layers:
            x = layer(x, attention)
        return x


def encoder_config(hf: PretrainedConfig, *, dtype: Any, first_position: int = 0) -> EncoderConfig:
    """EncoderConfig from a config of transformers. Raises ValueError for what is not supported."""
    check_encoder(hf)
    kind = getattr(hf, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ValueError(f"position_embedding_type {kind!r} is not supported; absolute is")
    return EncoderConfig(
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        num_positions=hf.max_position_embeddings,
        first_position=first_position,
        num_types=hf.type_vocab_size,
        activation=hf.hidden_act,
        norm_eps=hf.layer_norm_eps,
        dtype=jnp.dtype(dtype),
        initializer_range=hf.initializer_range,
    )


def check_encoder(hf: PretrainedConfig) -> None:
    """Raise ValueError for heads that do not divide the model dim, and for unknown activations."""
    if hf.hidden_size % hf.num_attention_heads:
        raise ValueError(
            f"hidden_size {hf.hidden_size} is not a multiple of num_attention_heads "
            f"{hf.num_attention_heads}; correct config.json"
        )
    activation_of(hf, (hf.architectures or ["?"])[0])
    if getattr(hf, "is_decoder", False):
        raise ValueError("is_decoder is set in config.json; this family is served as an encoder")
