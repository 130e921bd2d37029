"""ModernBERT: norms before each half of a layer, RoPE, gated MLP, and windows in most layers.

Knows transformers' names of its config. Must not know checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.encoder import LayerNorm, check_encoder
from jaxpage.models.layers import ACTIVATION_FUNCTIONS, Embedding, Linear, Normal
from jaxpage.models.rope import Rope, layer_ropes
from jaxpage.models.token_batch import RowAttention, TokenBatch
from pallas_kernels.rope.xla import rotate

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig:
    """`windows` and `ropes` have one entry per layer."""

    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    longest: int  # most tokens of a text
    windows: tuple[int | None, ...]  # token i sees token j iff |i - j| < window
    ropes: tuple[Rope, ...]
    activation: str
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: jnp.dtype
    initializer_range: float = 0.02  # standard deviation of dummy weights


def _norm(config: ModernBertConfig) -> LayerNorm:
    return LayerNorm(
        config.hidden_size, eps=config.norm_eps, bias=config.norm_bias, dtype=config.dtype
    )


def _linear(
    config: ModernBertConfig, size_in: int, size_out: int, axes: tuple[str, str], bias: bool
) -> Linear:
    init = Normal(config.initializer_range)
    return Linear((size_out, size_in), axes=axes, bias=bias, init=init, dtype=config.dtype)


class Attention(nnx.Module):
    """Projections and rotation; attention itself is an argument."""

    def __init__(self, config: ModernBertConfig, index: int):
        self.config, self.index = config, index
        size, bias = config.hidden_size, config.attention_bias
        self.Wqkv = _linear(config, size, 3 * size, ("heads", "embed"), bias)
        self.Wo = _linear(config, size, size, ("embed", "heads"), bias)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attention: RowAttention
    ) -> jax.Array:
        config = self.config
        head_dim = config.hidden_size // config.num_heads
        q, k, v = (
            part.reshape(*x.shape[:-1], config.num_heads, head_dim)
            for part in jnp.split(self.Wqkv(x), 3, axis=-1)
        )
        # Like transformers: rotate in float32 and round once.
        q, k = (part.astype(jnp.float32) for part in (q, k))
        q, k = (part.astype(x.dtype) for part in rotate([q, k], *rotation))
        window = config.windows[self.index]
        out = attention(self.index, q, k, v, scale=head_dim**-0.5, window=window, soft_cap=None)
        return self.Wo(out.reshape(x.shape))


class MLP(nnx.Module):
    """Wo(activation(a) * b), where Wi gives a and b."""

    def __init__(self, config: ModernBertConfig):
        self.activation = config.activation
        embed, inner = config.hidden_size, config.intermediate_size
        self.Wi = _linear(config, embed, 2 * inner, ("mlp", "embed"), config.mlp_bias)
        self.Wo = _linear(config, inner, embed, ("embed", "mlp"), config.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        inner, gate = jnp.split(self.Wi(x), 2, axis=-1)
        return self.Wo(ACTIVATION_FUNCTIONS[self.activation](inner) * gate)


class ModernBertLayer(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual; the first attention has no norm."""

    def __init__(self, config: ModernBertConfig, index: int):
        self.attn_norm = _norm(config) if index else None
        self.attn = Attention(config, index)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attention: RowAttention
    ) -> jax.Array:
        normed = x if self.attn_norm is None else self.attn_norm(x)
        x = x + self.attn(normed, rotation, attention)
        return x + self.mlp(self.mlp_norm(x))


class ModernBert(nnx.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModernBertConfig):
        self.config = config
        init = Normal(config.initializer_range)
        self.tok_embeddings = Embedding(
            config.vocab_size, config.hidden_size, init=init, dtype=config.dtype
        )
        self.embedding_norm = _norm(config)
        self.layers = nnx.List([ModernBertLayer(config, i) for i in range(config.num_layers)])
        self.final_norm = _norm(config)

    def __call__(self, batch: TokenBatch) -> jax.Array:
        """[B, L, E] in the model's dtype."""
        config = self.config
        attention = RowAttention(batch, causal=False)
        x = self.embedding_norm(self.tok_embeddings(batch.token_ids))
        # Like transformers: angles are rounded to the model's dtype.
        rotations: dict[Rope, tuple[jax.Array, jax.Array]] = {}
        for rope in dict.fromkeys(config.ropes):
            cos, sin = rope.angles(batch.positions, x.dtype)
            rotations[rope] = cos.astype(jnp.float32), sin.astype(jnp.float32)
        for layer, rope in zip(self.layers, config.ropes, strict=True):
            x = layer(x, rotations[rope], attention)
        return self.final_norm(x)


def modernbert_config(hf: PretrainedConfig, *, dtype: Any) -> ModernBertConfig:
    """ModernBertConfig from a config of transformers. Raises ValueError for what is not supported."""
    check_encoder(hf)
    windows = {"full_attention": None, "sliding_attention": hf.local_attention // 2 + 1}
    unknown = sorted(set(hf.layer_types) - set(windows))
    if unknown:
        raise ValueError(
            f"layer_types contains {', '.join(unknown)}; supported are {', '.join(windows)}"
        )
    head_dim = hf.hidden_size // hf.num_attention_heads
    return ModernBertConfig(
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        longest=hf.max_position_embeddings,
        windows=tuple(windows[kind] for kind in hf.layer_types),
        ropes=layer_ropes(
            hf, hf.layer_types, head_dim=head_dim, max_model_len=hf.max_position_embeddings
        ),
        activation=hf.hidden_activation,
        norm_eps=hf.norm_eps,
        norm_bias=hf.norm_bias,
        attention_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
        dtype=jnp.dtype(dtype),
        initializer_range=hf.initializer_range,
    )
