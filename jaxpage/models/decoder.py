"""The decoder most families share: Llama, Mistral, Qwen 2 and 3, Phi-3 differ in data only (`ModelConfig`).

Attribute paths are the names in Hugging Face checkpoints (`model.layers.0.self_attn.q_proj.weight`). Knows neither
checkpoints nor how attention finds its keys: that is an argument. Layers are unrolled; scanned layers would stack the
pool, and XLA copies stacked pools.

Letters: T tokens, H query heads, K KV heads, D head dim, E model dim, F MLP dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.attention import Attention, DenseAttention
from jaxpage.models.config import ModelConfig
from jaxpage.models.experts import MixtureOfExperts
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.latent_attention import LatentAttention
from jaxpage.models.layers import (
    ACTIVATION_FUNCTIONS,
    Embedding,
    Linear,
    Norm,
    Normal,
    NormLayer,
    RMSNorm,
    times,
)
from jaxpage.models.lora import with_adapters
from jaxpage.models.recurrence import Recurrence
from jaxpage.models.rope import Rotation
from jaxpage.ops.matmul import matmul
from pallas_kernels.rope.reference import split


class SelfAttention(nnx.Module):
    """Projections, optional norms of q and k, RoPE; the attention proper is an argument."""

    def __init__(self, config: ModelConfig, index: int, norm: Norm, *, width: int | None = None):
        """width: of the input, if it is not the model dim."""
        self.config, self.index = config, index
        # Of the projections besides q_proj those that the layer has, or had before they were joined.
        self.kv_projections: tuple[str, ...] = ("k_proj", "v_proj")
        num_kv_heads, head_dim = config.kv_heads(index)
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        embed = config.hidden_size
        width = width or embed
        init, dtype = Normal(config.initializer_range), config.dtype

        def projection(num_heads: int, axis: str) -> Linear:
            return Linear(
                (num_heads * head_dim, width),
                axes=(axis, "embed"),
                units=(num_heads, width),
                bias=config.qkv_bias,
                init=init,
                dtype=dtype,
            )

        self.q_proj = projection(config.num_heads, "heads")
        self.k_proj: Linear | None = projection(num_kv_heads, "kv_heads")
        self.v_proj: Linear | None = projection(num_kv_heads, "kv_heads")
        self.o_proj = Linear(
            (embed, config.num_heads * head_dim),
            axes=("embed", "heads"),
            units=(embed, config.num_heads),
            bias=config.output_bias,
            init=init,
            dtype=dtype,
        )
        sizes = (head_dim, head_dim)
        if config.qk_norm == "projection":
            sizes = (config.num_heads * head_dim, num_kv_heads * head_dim)
        norms = [norm(size, axis="head_dim", eps=config.norm_eps, dtype=dtype) for size in sizes]
        self.q_norm, self.k_norm = norms if config.qk_norm else (None, None)
        self.qkv_proj: Linear | None = (
            None  # the three projections as one Linear, see `weights.transform`
        )
        self.sinks: nnx.Param | None = None  # [H], of families that have them

    @property
    def projection_sizes(self) -> dict[str, int]:
        """Outputs of each projection of the input, in the order in which they are joined."""
        of_kv = dict.fromkeys(self.kv_projections, self.num_kv_heads * self.head_dim)
        return {"q_proj": self.config.num_heads * self.head_dim} | of_kv

    @property
    def joined_projections(self) -> dict[str, dict[str, int]]:
        """Name of a joined projection -> its parts, as `projection_sizes`."""
        return {"qkv_proj": self.projection_sizes}

    @property
    def _num_heads(self) -> tuple[int, int, int]:
        """How many heads q, k and v are projected to."""
        return self.config.num_heads, self.num_kv_heads, self.num_kv_heads

    def __call__(self, x: jax.Array, rotation: Rotation, attention: Attention) -> jax.Array:
        out = self._attend(*self._heads(x, rotation), attention)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, attention: Attention) -> jax.Array:
        """[..., H, D]"""
        config = self.config
        sinks = {} if self.sinks is None else {"sinks": self.sinks[...]}
        return attention(
            self.index,
            q,
            k,
            v,
            scale=config.attention_scale,
            window=config.windows[self.index],
            soft_cap=config.attention_soft_cap,
            **sinks,
        )

    def _heads(self, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [..., H, D], k and v [..., K, D]; q and k normalised and rotated."""
        config = self.config
        if self.qkv_proj is not None and not config.qk_norm:
            interleaved = config.ropes[self.index].interleaved
            return rotation.split(self.qkv_proj(x), self._num_heads, interleaved=interleaved)
        q, k, v = self._projected(x)
        return self._turned(q, k, v, rotation)

    def _projected(self, x: jax.Array) -> Sequence[jax.Array]:
        """q, k and v, each [..., all its heads]."""
        if self.qkv_proj is not None:
            parts = split(self.qkv_proj(x), self._num_heads)
            return tuple(part.reshape(*x.shape[:-1], -1) for part in parts)
        assert self.k_proj is not None and self.v_proj is not None
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def _turned(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rotation: Rotation
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`_heads` of what the projections return."""
        config, lead = self.config, q.shape[:-1]
        if config.qk_norm == "projection" and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.reshape(*lead, -1, self.head_dim) for part in (q, k, v))
        if config.qk_norm is True and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotation.turn(q, k, interleaved=config.ropes[self.index].interleaved)
        return q, k, v


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig, inner: int | None = None):
        """inner: the MLP dim, if it is not the config's."""
        self.activation = config.activation
        embed = config.hidden_size
        inner = config.intermediate_size if inner is None else inner

        def projection(shape: tuple[int, int], axes: tuple[str, str]) -> Linear:
            init = Normal(config.initializer_range)
            return Linear(shape, axes=axes, bias=config.mlp_bias, init=init, dtype=config.dtype)

        self.gate_proj = projection((inner, embed), ("mlp", "embed"))
        self.up_proj = projection((inner, embed), ("mlp", "embed"))
        self.down_proj = projection((embed, inner), ("embed", "mlp"))
        self.gate_up_proj: Linear | None = None  # both as one Linear, see `weights.transform`
        self._inner = inner

    @property
    def joined_projections(self) -> dict[str, dict[str, int]]:
        """As of `SelfAttention`."""
        return {"gate_up_proj": {"gate_proj": self._inner, "up_proj": self._inner}}

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self._gate_and_up(x)
        return self.down_proj(ACTIVATION_FUNCTIONS[self.activation](gate) * up)

    def _gate_and_up(self, x: jax.Array) -> Sequence[jax.Array]:
        if self.gate_up_proj is None:
            return self.gate_proj(x), self.up_proj(x)
        return jnp.split(self.gate_up_proj(x), 2, axis=-1)


def mlp_or_experts(config: ModelConfig, index: int) -> MLP | MixtureOfExperts:
    """What layer `index` has after its attention."""
    experts = config.experts
    if experts is None or index not in experts.layers:
        return MLP(config)
    shared = None if experts.shared_size is None else MLP(config, experts.shared_size)
    return MixtureOfExperts(config, experts, shared)


class DecoderLayer(nnx.Module):
    """Attention and MLP or experts, each after a norm and beside a residual."""

    def __init__(self, config: ModelConfig, index: int, *, norm: Norm = RMSNorm):
        self.residual_scale = config.scales.residual
        self.input_layernorm = hidden_norm(norm, config)
        self.self_attn = (
            SelfAttention(config, index, norm)
            if config.latent is None
            else LatentAttention(config, config.latent, index)
        )
        self.post_attention_layernorm = hidden_norm(norm, config)
        self.mlp = mlp_or_experts(config, index)

    def __call__(
        self,
        x: jax.Array,
        rotation: Rotation,
        attention: Attention,
        is_token: jax.Array | None = None,
        load: list[jax.Array] | None = None,
        *,
        recurrence: Recurrence | None = None,
    ) -> jax.Array:
        """recurrence: for models with layers that have a recurrent state."""
        x = x + self._scaled(self.first_half(x, rotation, attention, recurrence))
        return x + self._scaled(self.second_half(x, is_token, load))

    def first_half(
        self,
        x: jax.Array,
        rotation: Rotation,
        attention: Attention,
        recurrence: Recurrence | None,
    ) -> jax.Array:
        """What attention, or what a layer has in its place or beside it, adds to x, before the scale."""
        del recurrence
        return self.self_attn(self.input_layernorm(x), rotation, attention)

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.residual_scale is None else times(x, self.residual_scale)

    def second_half(
        self, x: jax.Array, is_token: jax.Array | None, load: list[jax.Array] | None
    ) -> jax.Array:
        """The same of the MLP or the experts."""
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(normed, is_token, load)
        return self.mlp(normed)


def hidden_norm(norm: Norm, config: ModelConfig) -> NormLayer:
    """A norm over the model dim."""
    return norm(config.hidden_size, axis="embed", eps=config.norm_eps, dtype=config.dtype)


class Decoder(nnx.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, layer: Callable[..., nnx.Module], norm: Norm):
        self.config = config
        self.embed_tokens = Embedding(
            config.vocab_size,
            config.hidden_size,
            init=Normal(config.initializer_range),
            dtype=config.dtype,
        )
        self.layers = nnx.List([layer(config, index) for index in range(config.num_layers)])
        self.norm = hidden_norm(norm, config)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """[..., E] of int32[...] tokens: what the first layer gets."""
        x = self.embed_tokens(token_ids)
        scale = self.config.scales.embedding
        # Rounded to the model's dtype first: the weights were trained with that.
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def placed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Embeddings [..., E] with those of their positions, int32[...], in families that have some."""
        del positions
        return x

    def __call__(self, inputs: ForwardInput) -> jax.Array:
        config = self.config
        x = self.embed(inputs.token_ids)
        deeper: list[jax.Array] = []  # what is added to the outputs of the first layers
        if inputs.embeds is not None and inputs.is_embed is not None:
            is_embed = inputs.is_embed[..., None]
            embeds, num_parts = inputs.embeds, inputs.embeds.shape[-1] // x.shape[-1]
            if num_parts > 1:
                embeds, *deeper = jnp.split(embeds, num_parts, axis=-1)
            x = jnp.where(is_embed, embeds, x)
            deeper = [jnp.where(is_embed, each, 0) for each in deeper]
        x = self.placed(x, inputs.positions)
        rotations = {rope: inputs.rotation(rope, x.dtype) for rope in dict.fromkeys(config.ropes)}
        given = zip(self.layers, config.ropes, self.layer_inputs(inputs, x), strict=True)
        for index, (layer, rope, more) in enumerate(given):
            inputs.keep(index, x)
            x = layer(x, rotations[rope], inputs.attention, **more)
            if index < len(deeper):
                x += deeper[index]
        inputs.keep(config.num_layers, x)
        return self.norm(x)

    def layer_inputs(self, inputs: ForwardInput, x: jax.Array) -> list[dict[str, Any]]:
        """Further arguments of each layer. x: the first layer's input."""
        more: dict[str, Any] = {}
        if self.config.experts is not None:
            more = {"is_token": inputs.is_token, "load": inputs.expert_load}
        if self.config.recurrent is not None:
            more["recurrence"] = inputs.recurrence
        return [more] * self.config.num_layers


def check_length(config: ModelConfig, num_tokens: int) -> None:
    """Raise ValueError for texts with more tokens than the model has learned positions."""
    if config.num_positions is not None and num_tokens > config.num_positions:
        raise ValueError(
            f"{num_tokens} tokens in a row, but the model has learned {config.num_positions} positions; give shorter "
            "texts"
        )


class CausalLM(nnx.Module):
    """A decoder with a language-model head. Fresh from the constructor it is abstract (see `layers.param`)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer: Callable[..., nnx.Module] = DecoderLayer,
        norm: Norm = RMSNorm,
        decoder: type[Decoder] = Decoder,
    ):
        self.config = config
        self.model = decoder(config, layer, norm)
        head = Linear(
            (config.vocab_size, config.hidden_size),
            axes=("vocab", "embed"),
            bias=False,
            init=Normal(config.initializer_range),
            dtype=config.dtype,
        )
        self.lm_head = None if config.tie_word_embeddings else head

    def part(self, path: str) -> tuple[Callable[[Any], Any], Any]:
        """`make` and arrays: `make(arrays)` is the module at a dotted path, "" for all of it.

        For functions that get all arrays they read as arguments.
        """
        module: Any = self
        for name in path.split(".") if path else ():
            module = module[int(name)] if name.isdigit() else getattr(module, name)
        graphdef, arrays = nnx.split(module)
        return partial(nnx.merge, graphdef), arrays

    def hidden_states(self, inputs: ForwardInput) -> jax.Array:
        """[..., T, E] in the model's dtype, after the final norm."""
        return with_adapters(self.model, inputs.adapter_slots)(inputs)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., E] -> float32[..., V], scaled and soft-capped where the family does so."""
        if self.lm_head is None:
            logits = matmul(hidden, self.model.embed_tokens.weight[...])
        else:
            bias = None if self.lm_head.bias is None else self.lm_head.bias[...]
            logits = self.lm_head.product(hidden, bias=bias)
        scale, cap = self.config.scales.logits, self.config.scales.logits_soft_cap
        if scale is not None:
            logits = logits * scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def __call__(self, token_ids: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Logits float32[..., T, V] of int32[..., T] tokens, dense and differentiable; positions are 0 .. T-1 by
        default. Raises ValueError for more tokens than learned positions; given ones that are too large count as the
        last.
        """
        if positions is None:
            check_length(self.config, token_ids.shape[-1])
            positions = jnp.broadcast_to(
                jnp.expand_dims(
                    jnp.arange(token_ids.shape[-1], dtype=jnp.int32), range(token_ids.ndim - 1)
                ),
                token_ids.shape,
            )
        attention = DenseAttention(positions)
        inputs = ForwardInput(token_ids=token_ids, positions=positions, attention=attention)
        return self.logits(self.hidden_states(inputs))
