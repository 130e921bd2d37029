"""The description of a decoder: one frozen dataclass, read once from a Hugging Face config.

Knows the names of transformers' config attributes. Must not know parameters or checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp

from jaxpage.models.layers import ACTIVATION_FUNCTIONS
from jaxpage.models.recurrent_config import RecurrentLayers
from jaxpage.models.rope import Rope, layer_ropes
from jaxpage.pictures.border import VisionConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router scores experts."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    # A number for each expert is added to its score when experts are chosen, but not in their shares.
    has_correction: bool = False
    correction_axes: int = 1  # more than one: the others have size 1
    # Equal groups of consecutive experts; a token's experts are in as many of them, chosen by the sum of their best.
    num_groups: int = 1
    chosen_groups: int = 1
    num_best: int = 2
    factor: float = 1.0  # of shares
    added_to_sum: float = 0.0  # of shares, before it divides them so that they add up to one
    least_sum: float = 1e-20  # that divides them
    in_float32: bool = False  # the router's weight, whatever the model's dtype


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts that replaces the MLP in some layers."""

    layers: tuple[int, ...]  # layers with experts; the others have an MLP
    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of an expert
    shares_add_up_to_one: bool  # for a token's experts; else parts of a softmax over all
    shared_size: int | None = None  # intermediate size of the expert for all tokens
    shared_gate: bool = True  # whether that has a gate of its own
    routing: Routing = Routing()
    bias: bool = False  # of router and experts
    has_gate: bool = True  # else experts are down(activation(up(x)))
    # Dim of what experts read and write, between projections of all tokens from and to hidden states; None: these.
    latent_size: int | None = None
    # gpt-oss: gate and up are clamped to it, and up is offset by 1: g sigmoid(slope g) (u + 1).
    swiglu_limit: float | None = None
    swiglu_slope: float = 1.702

    def __post_init__(self):
        counts = (self.experts_per_token, self.num_experts)
        if None in counts or not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"{self.experts_per_token} experts for each token of {self.num_experts}: check "
                "num_experts_per_tok and the number of experts in config.json"
            )
        if self.intermediate_size < 1 or (self.shared_size or 0) < 0:
            raise ValueError(
                f"experts of {self.intermediate_size} and a shared one of {self.shared_size}: check their "
                "intermediate sizes and the number of shared experts in config.json"
            )
        groups, chosen = self.routing.num_groups, self.routing.chosen_groups
        if groups == 1:
            return
        size = self.num_experts // max(groups, 1)
        least = self.routing.num_best
        if groups < 1 or self.num_experts % groups or size < least or not 1 <= chosen <= groups:
            raise ValueError(
                f"{self.num_experts} experts cannot be in {groups} equal groups of at least {least}, of which {chosen} "
                "are chosen: check n_group and topk_group in config.json"
            )
        if self.experts_per_token > chosen * size:
            raise ValueError(
                f"{self.experts_per_token} experts for each token in {chosen} groups of {size}: check "
                "num_experts_per_tok, n_group and topk_group in config.json"
            )


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Constant factors between the parts of a decoder; None: not used."""

    embedding: float | None = None  # of token embeddings
    residual: float | None = None  # of the outputs of attention and MLP
    # Falcon-H1: of inputs and outputs of attention and of the recurrent part; of the MLP's gate, and of its output.
    attention: tuple[float, float] | None = None
    recurrence: tuple[float, float] | None = None
    mlp: tuple[float, float] | None = None
    logits: float | None = None
    logits_soft_cap: float | None = None  # cap * tanh(logits / cap), after the factor


@dataclass(frozen=True, kw_only=True)
class Gemma4Options:
    """What only Gemma 4 has."""

    values_are_keys: bool  # in layers without a window, before the norms of both
    wide_shared_mlp: bool  # twice as wide in layers without KV of their own
    per_layer_size: int  # of the embeddings of a token for each layer; 0: none
    per_layer_vocab_size: int  # of these
    padding_token_id: int  # whose embeddings for layers those that replace tokens have


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Of multi-head latent attention, see `latent_attention`; DeepSeek's names in comments."""

    query_rank: int | None  # q_lora_rank; None: queries have no latent
    rank: int  # kv_lora_rank: of the latent of keys and values
    plain_dim: int  # qk_nope_head_dim: of a head's query and key, what is not rotated
    rotated_dim: int  # qk_rope_head_dim: what is; all heads share that part of the key
    value_dim: int  # v_head_dim


@dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """What only EAGLE heads have, see `models.eagle3` and `models.eagle`, and MTP layers, see `models.mtp`."""

    # Of the engine's model, whose inputs are read; (): its final hidden states are.
    layers: tuple[int, ...]
    target_hidden_size: int  # of that model
    has_head: bool = True  # an LM head of its own, as EAGLE-3; otherwise the model's
    vocab_size: int = 0  # tokens that its own one knows
    has_map: bool = False  # from these to the model's; otherwise both have the same numbers
    has_embedding: bool = False  # of its own; otherwise the model's
    has_bias: bool = False  # what maps pairs to inputs, of the first EAGLE
    # What is normalised: the feature with which the residual begins, all hidden states that are read together, those of
    # each layer, the features that the head makes itself.
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mtp_layer: int | None = None  # its number in the checkpoint, if the head is an MTP layer


class KVHeads(NamedTuple):
    """The KV heads of a layer."""

    num: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only model. `windows` and `ropes` have one entry per layer; biases are off by default."""

    architecture: str  # the name in `config.json`, the key of `registry.REGISTRY`
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    # Of parameters and activations; norms, softmax, RoPE angles and logits are float32.
    dtype: jnp.dtype
    max_model_len: int  # tokens that `ropes` are made for
    norm_eps: float
    activation: str  # of `layers.ACTIVATION_FUNCTIONS`
    tie_word_embeddings: bool
    # Key j is visible to query i iff i - window < j <= i; None: j <= i.
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # Per head, or "projection": over all heads together.
    qk_norm: bool | Literal["projection"] = False
    attention_soft_cap: float | None = None
    scales: Scales = Scales()
    initializer_range: float = 0.02  # standard deviation of dummy weights
    vision: VisionConfig | None = None  # of the model's `visual`, if it takes pictures
    experts: ExpertsConfig | None = None
    # Of layers without a window; None: `num_kv_heads` and `head_dim`, as in all others.
    full_heads: KVHeads | None = None
    # Number of layers, the last ones, without keys and values of their own: each reads those of the last layer before
    # them with the same window.
    num_kv_shared_layers: int = 0
    gemma4: Gemma4Options | None = None
    # Then there is one KV head: its keys are a token's latent and rotated key, its values the latent.
    latent: LatentSizes | None = None
    recurrent: RecurrentLayers | None = None
    # Of each layer, if it has one of these alone (Nemotron-H); "mlp": an MLP or experts.
    mixers: tuple[Literal["attention", "recurrence", "mlp"], ...] | None = None
    eagle: EagleOptions | None = None
    parallel_residual: bool = False  # attention and MLP both read the layer's input (GPT-NeoX)
    num_positions: int | None = (
        None  # that have embeddings (GPT-2); None: positions are not learned
    )
    scale_falls: bool = False  # `attention_scale` is divided by 1, 2, ... in the layers (GPT-2)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        if self.mixers is not None:
            return tuple(i for i, mixer in enumerate(self.mixers) if mixer == "attention")
        sizes = self.recurrent
        without = () if sizes is None or sizes.beside_attention else sizes.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in without)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with keys and values of their own."""
        end = self.num_layers - self.num_kv_shared_layers
        return tuple(layer for layer in self.attention_layers if layer < end)

    @property
    def value_dim(self) -> int | None:
        """If values are the first elements of the keys, how many."""
        return None if self.latent is None else self.latent.rank

    def kv_heads(self, layer: int) -> KVHeads:
        if self.full_heads is not None and self.windows[layer] is None:
            return self.full_heads
        return KVHeads(self.num_kv_heads, self.head_dim)

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values layer `layer` reads."""
        if layer in self.kv_layers:
            return layer
        return max(each for each in self.kv_layers if self.windows[each] == self.windows[layer])


_COUNTS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


def decoder_config(
    hf: PretrainedConfig, *, dtype: Any, max_model_len: int | None = None, **facts: Any
) -> ModelConfig:
    """The ModelConfig of `hf`; `facts` are fields that the family fixes and its config does not have.

    `max_model_len` defaults to the config's `max_position_embeddings`. Raises ValueError for what is not supported.
    """
    architecture = facts.get("architecture") or (hf.architectures or ["?"])[0]
    counts_of(hf, _COUNTS, architecture)
    num_heads, num_kv_heads = hf.num_attention_heads, facts.get("num_kv_heads")
    if num_kv_heads is None:
        (num_kv_heads,) = counts_of(hf, ("num_key_value_heads",), architecture)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{architecture}: {num_heads} query heads cannot share {num_kv_heads} KV heads evenly; "
            "check num_attention_heads and num_key_value_heads in config.json"
        )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // num_heads
    length: int = hf.max_position_embeddings if max_model_len is None else max_model_len  # type: ignore
    if length < 1:
        raise ValueError(f"max_model_len is {length}; it must be at least 1")
    layer_types = _layer_types(hf)
    full: KVHeads | None = facts.get("full_heads")
    head_dims = {_SLIDING: head_dim, _FULL: full.head_dim if full else head_dim}
    windows = tuple(hf.sliding_window if kind == _SLIDING else None for kind in layer_types)
    attention_bias = bool(getattr(hf, "attention_bias", False))
    fields = {
        "architecture": architecture,
        "num_layers": hf.num_hidden_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": facts.get("intermediate_size") or hf.intermediate_size,
        "dtype": jnp.dtype(dtype),
        "max_model_len": length,
        "norm_eps": facts["norm_eps"] if "norm_eps" in facts else hf.rms_norm_eps,
        "activation": facts.get("activation") or activation_of(hf, architecture),
        "tie_word_embeddings": bool(getattr(hf, "tie_word_embeddings", False)),
        "windows": windows,
        "ropes": facts.get("ropes")
        or layer_ropes(hf, layer_types, head_dim=head_dims, max_model_len=length),
        "attention_scale": head_dim**-0.5,
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        # Most models in transformers have no such option, and no biases there, whatever config.json says.
        "mlp_bias": _has_option(hf, "mlp_bias") and bool(hf.mlp_bias),
        "initializer_range": hf.initializer_range,
    }
    return ModelConfig(**(fields | facts))


def counts_of(hf: PretrainedConfig, names: Iterable[str], owner: str) -> list[int]:
    """These numbers of `hf`. Raises ValueError, which names their `owner`, for one that is no positive integer."""
    counts = {name: getattr(hf, name) for name in names}
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(
                f"{owner}: {name} is {count!r} in config.json; it must be a positive integer"
            )
    return list(counts.values())


def activation_of(hf: PretrainedConfig, owner: str) -> str:
    """The activation of the MLPs of `hf`. Raises ValueError, which names their `owner`, if it is not supported."""
    options = ("hidden_activation", "mlp_hidden_act", "activation_function")
    name = getattr(hf, next((each for each in options if _has_option(hf, each)), "hidden_act"))
    if name not in ACTIVATION_FUNCTIONS:
        known = ", ".join(ACTIVATION_FUNCTIONS)
        raise ValueError(f"{owner}: activation {name!r}; supported are {known}")
    return name


def _has_option(hf: PretrainedConfig, name: str) -> bool:
    """Whether models of this kind have the option. A config keeps every key of config.json, theirs or not."""
    kind = type(hf)
    # Not all versions of transformers have dataclasses, whose defaults the class itself knows.
    return hasattr(kind, name) or (not is_dataclass(kind) and hasattr(kind(), name))


def _layer_types(hf: PretrainedConfig) -> list[str]:
    """The kind of attention of each layer; configs without `layer_types` use their window, if any, in all layers."""
    if not _has_option(hf, "sliding_window"):
        return [_FULL] * hf.num_hidden_layers
    everywhere = _FULL if hf.sliding_window is None else _SLIDING
    own = hf.layer_types if _has_option(hf, "layer_types") else None
    kinds = own or [everywhere] * hf.num_hidden_layers
    if unknown := sorted(set(kinds) - {_FULL, _SLIDING}):
        raise ValueError(
            f"layer_types contains {', '.join(unknown)}; supported are {_FULL} and {_SLIDING}"
        )
    if len(kinds) != hf.num_hidden_layers:
        raise ValueError(
            f"layer_types has {len(kinds)} entries for {hf.num_hidden_layers} layers; correct config.json"
        )
    if _SLIDING in kinds and hf.sliding_window is not None and hf.sliding_window < 1:
        raise ValueError(
            f"sliding_window is {hf.sliding_window} in config.json; it must be a positive number of tokens, or null"
        )
    return kinds
