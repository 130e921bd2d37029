"""Gemma 4: layers with different heads, keys and values that several layers share, an embedding for each layer, experts
beside the MLP.

Formulas: transformers' `modeling_gemma4.py`. Knows transformers' names of the family's options; must not know
checkpoints.

Letters: T tokens, E model dim, H query heads, K KV heads, D head dim, P dim of the embeddings for layers, L layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.models.attention import Attention
from jaxpage.models.config import (
    ExpertsConfig,
    Gemma4Options,
    KVHeads,
    ModelConfig,
    Scales,
    activation_of,
    decoder_config,
)
from jaxpage.models.decoder import MLP, CausalLM, Decoder, Rotation, SelfAttention, hidden_norm
from jaxpage.models.experts import MixtureOfExperts
from jaxpage.models.gemma4_vision import Gemma4Tower
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.layers import (
    ACTIVATION_FUNCTIONS,
    Constant,
    Embedding,
    Linear,
    Normal,
    WideRMSNorm,
    normalise,
    param,
    times,
)
from jaxpage.models.router import Router
from jaxpage.models.vision import PictureLM
from jaxpage.pictures.gemma4 import Gemma4VisionConfig, gemma4_vision_config
from pallas_kernels.rope.reference import split

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"

# Keys [..., T, K, D], normalised and rotated, and values of the layers so far.
LayerKV = dict[int, tuple[jax.Array, jax.Array]]


class Gemma4Attention(SelfAttention):
    """Attention with norms of queries, keys and values. Values may be the keys, with a norm of their own; the last
    layers read the keys and values of an earlier one.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index, WideRMSNorm)
        assert config.gemma4 is not None
        if config.gemma4.values_are_keys and config.windows[index] is None:
            self.v_proj, self.kv_projections = None, ("k_proj",)
        if index not in config.kv_layers:
            self.k_proj = self.v_proj = self.k_norm = None
            self.kv_projections = ()

    def __call__(
        self, x: jax.Array, rotation: Rotation, attention: Attention, kv: LayerKV
    ) -> jax.Array:
        config = self.config
        q, *own = self._projected(x)
        assert self.q_norm is not None
        q = self.q_norm(q)
        if self.k_norm is None:
            (q,) = rotation.turn(q)
        else:
            k, v = own[0], own[-1]
            q, k = rotation.turn(q, self.k_norm(k))
            kv[self.index] = k, normalise(v, config.norm_eps).astype(v.dtype)
        source = config.kv_layer(self.index)
        out = attention(
            source,
            q,
            *kv[source],
            scale=config.attention_scale,
            window=config.windows[self.index],
            soft_cap=None,
        )
        return self.o_proj(out.reshape(*x.shape[:-1], -1))

    def _projected(self, x: jax.Array) -> list[jax.Array]:
        """q [..., T, H, D], and those of k and v [..., T, K, D] that the layer has."""
        sizes = self.projection_sizes
        heads = [size // self.head_dim for size in sizes.values()]
        if self.qkv_proj is not None:
            return split(self.qkv_proj(x), heads)
        projections = [getattr(self, name) for name in sizes]
        return [
            project(x).reshape(*x.shape[:-1], number, self.head_dim)
            for project, number in zip(projections, heads, strict=True)
        ]


class Gemma4Router(Router):
    """A router with a norm before it, and a factor for each expert (`Gemma4TextRouter`)."""

    def __init__(self, config: ModelConfig, settings: ExpertsConfig):
        super().__init__(config, settings)
        size, dtype = config.hidden_size, config.dtype
        self.norm_eps = config.norm_eps
        self.input_scale = param((size,), axes=("embed",), init=Constant(1.0), dtype=dtype)
        self.per_expert_scale = param(
            (settings.num_experts,), axes=("router",), init=Constant(1.0), dtype=dtype
        )

    def choose(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        normed = normalise(rows, self.norm_eps).astype(rows.dtype)
        scaled = times(normed * self.input_scale[...][None], rows.shape[-1] ** -0.5)
        chosen, shares = super().choose(scaled)
        return chosen, shares * self.per_expert_scale[...].astype(jnp.float32)[chosen]


def _mixture(config: ModelConfig, settings: ExpertsConfig) -> MixtureOfExperts:
    mixture = MixtureOfExperts(config, settings, None)
    mixture.gate = Gemma4Router(config, settings)
    return mixture


class Gemma4Layer(nnx.Module):
    """Attention, then an MLP, with experts beside it in some models, then what the layer's own embedding of the tokens
    adds; norms before and after each, and a factor on the result.
    """

    def __init__(self, config: ModelConfig, index: int):
        options = config.gemma4
        assert options is not None
        self.activation = config.activation
        self.input_layernorm = hidden_norm(WideRMSNorm, config)
        self.self_attn = Gemma4Attention(config, index)
        self.post_attention_layernorm = hidden_norm(WideRMSNorm, config)
        self.pre_feedforward_layernorm = hidden_norm(WideRMSNorm, config)
        is_wide = options.wide_shared_mlp and index not in config.kv_layers
        self.mlp = MLP(config, (1 + is_wide) * config.intermediate_size)
        self.post_feedforward_layernorm = hidden_norm(WideRMSNorm, config)
        self.layer_scalar = param((1,), axes=("embed",), init=Constant(1.0), dtype=config.dtype)
        self.moe = None if config.experts is None else _mixture(config, config.experts)
        if config.experts is not None:
            self.post_feedforward_layernorm_1 = hidden_norm(WideRMSNorm, config)
            self.pre_feedforward_layernorm_2 = hidden_norm(WideRMSNorm, config)
            self.post_feedforward_layernorm_2 = hidden_norm(WideRMSNorm, config)
        size, embed = options.per_layer_size, config.hidden_size
        self.per_layer_input_gate = _whole((size, embed), config) if size else None
        if size:
            self.per_layer_projection = _whole((embed, size), config)
            self.post_per_layer_input_norm = hidden_norm(WideRMSNorm, config)

    def __call__(
        self,
        x: jax.Array,
        rotation: Rotation,
        attention: Attention,
        *,
        kv: LayerKV,
        own_embedding: jax.Array | None = None,
        **of_experts: Any,
    ) -> jax.Array:
        """own_embedding: [..., T, P] of the layer, if the model has such; of_experts: see `MixtureOfExperts`."""
        attended = self.self_attn(self.input_layernorm(x), rotation, attention, kv)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self._feedforward(x, **of_experts))
        if own_embedding is not None and self.per_layer_input_gate is not None:
            gate = ACTIVATION_FUNCTIONS[self.activation](self.per_layer_input_gate(x))
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate * own_embedding))
        return x * self.layer_scalar[...][0]

    def _feedforward(self, x: jax.Array, **of_experts: Any) -> jax.Array:
        out = self.mlp(self.pre_feedforward_layernorm(x))
        if self.moe is None:
            return out
        given = self.pre_feedforward_layernorm_2(x)
        mixed = self.moe(given, **of_experts, router_input=x)
        return self.post_feedforward_layernorm_1(out) + self.post_feedforward_layernorm_2(mixed)


class Gemma4Decoder(Decoder):
    """A decoder whose layers share keys and values, and have embeddings of the tokens for each of them."""

    def __init__(self, config: ModelConfig, layer: Any, norm: Any):
        super().__init__(config, layer, norm)
        options = config.gemma4
        assert options is not None
        size, dtype = options.per_layer_size, config.dtype
        width, init = config.num_layers * size, Normal(config.initializer_range)
        table = Embedding(options.per_layer_vocab_size, width, init=init, dtype=dtype)
        self.padding = options.padding_token_id
        self.embed_tokens_per_layer = table if size else None
        if size:
            self.per_layer_model_projection = _whole((width, config.hidden_size), config)
            self.per_layer_projection_norm = WideRMSNorm(
                size, axis="head_dim", eps=config.norm_eps, dtype=dtype
            )

    def layer_inputs(self, inputs: ForwardInput, x: jax.Array) -> list[dict[str, Any]]:
        kv: LayerKV = {}
        given = [more | {"kv": kv} for more in super().layer_inputs(inputs, x)]
        if self.embed_tokens_per_layer is None:
            return given
        # [..., T, L * P]; of [..., T, L, P] a TPU would have to bring a layer's numbers together.
        token_ids = inputs.token_ids
        if inputs.is_embed is not None:  # transformers has padding there
            token_ids = jnp.where(inputs.is_embed, self.padding, token_ids)
        both = self.embed_tokens_per_layer(token_ids), self.per_layer_model_projection(x)
        of_tokens, projected = (jnp.split(each, len(given), axis=-1) for each in both)
        return [
            more | {"own_embedding": self._own_embedding(own, others, x.shape[-1])}
            for more, own, others in zip(given, of_tokens, projected, strict=True)
        ]

    def _own_embedding(
        self, of_tokens: jax.Array, projected: jax.Array, hidden_size: int
    ) -> jax.Array:
        """[..., T, P] of a layer, from the table and from the first layer's input."""
        of_tokens = of_tokens * jnp.asarray(of_tokens.shape[-1] ** 0.5, of_tokens.dtype)
        projected = self.per_layer_projection_norm(times(projected, hidden_size**-0.5))
        return times(projected + of_tokens, 2**-0.5)


def _whole(shape: tuple[int, int], config: ModelConfig) -> Linear:
    """A small linear layer, whole on every device."""
    init = Normal(config.initializer_range)
    return Linear(shape, axes=("embed", "embed"), bias=False, init=init, dtype=config.dtype)


def gemma4(config: ModelConfig) -> CausalLM:
    """A Gemma 4 text model."""
    return CausalLM(config, layer=Gemma4Layer, norm=WideRMSNorm, decoder=Gemma4Decoder)


def gemma4_with_pictures(config: ModelConfig) -> CausalLM:
    """A Gemma 4 with its vision tower, if it has one."""
    if config.vision is None:
        return gemma4(config)
    assert isinstance(config.vision, Gemma4VisionConfig)
    visual = Gemma4Tower(config.vision, config.dtype)
    return PictureLM(config, visual, layer=Gemma4Layer, norm=WideRMSNorm, decoder=Gemma4Decoder)


def gemma4_pictures_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None
) -> ModelConfig:
    """ModelConfig of a Gemma4ForConditionalGeneration; the audio tower is not used."""
    vision = None
    if hf.vision_config is not None:
        activation_of(hf.vision_config, "the vision tower")
        vision = gemma4_vision_config(hf)
    return gemma4_config(hf, dtype=dtype, max_model_len=max_model_len, vision=vision)


def gemma4_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
) -> ModelConfig:
    """ModelConfig of a Gemma4ForCausalLM, or of the text part of a Gemma4ForConditionalGeneration; also of Gemma 4
    Unified.
    """
    architecture = (hf.architectures or ["?"])[0]
    tied = bool(hf.tie_word_embeddings)
    text = hf.get_text_config()
    if text.use_bidirectional_attention == "all":
        raise ValueError(
            'use_bidirectional_attention is "all": an encoder cannot be decoded token by token; use a causal checkpoint'
        )
    _check_sharing(text)
    kinds = text.layer_types
    # As if all layers were like those with a window, and what differs in the others.
    plain = text.per_layer_config[kinds.index(_SLIDING) if _SLIDING in kinds else 0]
    full = text.per_layer_config[kinds.index(_FULL)] if _FULL in kinds else plain
    full_heads = KVHeads(full.num_key_value_heads, full.head_dim)
    is_different = full_heads != (plain.num_key_value_heads, plain.head_dim)
    _check_full_heads(text, full_heads)
    return decoder_config(
        plain,
        dtype=dtype,
        max_model_len=max_model_len,
        architecture=architecture,
        tie_word_embeddings=tied,
        qk_norm=True,
        attention_scale=1.0,
        full_heads=full_heads if is_different else None,
        num_kv_shared_layers=text.num_kv_shared_layers,
        scales=Scales(
            embedding=text.hidden_size**0.5, logits_soft_cap=text.final_logit_softcapping
        ),
        gemma4=_options(text),
        experts=_experts(text),
        **facts,
    )


def _options(text: PretrainedConfig) -> Gemma4Options:
    # Gemma 4 Unified has neither embeddings for layers nor experts.
    size = getattr(text, "hidden_size_per_layer_input", None) or 0
    vocab_size = getattr(text, "vocab_size_per_layer_input", 0)
    if size < 0 or (size and vocab_size < text.vocab_size):
        raise ValueError(
            f"embeddings for layers are {size} wide, of {vocab_size} tokens, and vocab_size is {text.vocab_size}: each "
            "token must have one; check hidden_size_per_layer_input and vocab_size_per_layer_input in config.json"
        )
    return Gemma4Options(
        values_are_keys=bool(text.attention_k_eq_v),
        wide_shared_mlp=bool(text.use_double_wide_mlp),
        per_layer_size=size,
        per_layer_vocab_size=vocab_size,
        padding_token_id=text.pad_token_id or 0,
    )


def _check_full_heads(text: PretrainedConfig, heads: KVHeads) -> None:
    """Raises ValueError if layers without a window have impossible heads."""
    if heads.num < 1 or text.num_attention_heads % heads.num:
        raise ValueError(
            f"{text.num_attention_heads} query heads cannot share {heads.num} KV heads evenly in layers without a "
            "window; check num_attention_heads and num_global_key_value_heads in config.json"
        )


def _check_sharing(text: PretrainedConfig) -> None:
    """Raises ValueError if a layer without KV has no layer of its kind before it that has."""
    kinds, num_shared = text.layer_types, text.num_kv_shared_layers
    first = len(kinds) - num_shared
    if not 0 <= num_shared < len(kinds) or not set(kinds[first:]) <= set(kinds[:first]):
        raise ValueError(
            f"num_kv_shared_layers is {num_shared} of {len(kinds)} layers: each kind of layer_types must be among the "
            "layers before these; correct config.json"
        )


def _experts(text: PretrainedConfig) -> ExpertsConfig | None:
    if not getattr(text, "enable_moe_block", False):
        return None
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if not isinstance(count := getattr(text, name), int) or count < 1:
            raise ValueError(
                f"{name} is {count!r} in config.json; with enable_moe_block it must be a positive integer"
            )
    return ExpertsConfig(
        layers=tuple(range(text.num_hidden_layers)),
        num_experts=text.num_experts,
        experts_per_token=text.top_k_experts,
        intermediate_size=text.moe_intermediate_size,
        shares_add_up_to_one=True,
    )
