"""Named points in a decoder, with TransformerLens' names, and a copy of the model that passes values to a function.

Letters: B batch, T tokens, E model dim, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
from flax import nnx

from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.experts import MixtureOfExperts

Tap = Callable[[str, jax.Array], jax.Array]  # (name, value) -> the new value

_OF_A_BLOCK = (
    "hook_resid_pre",  # [B, T, E] the input of the layer
    "hook_state_out",  # [B, T, E] the output of the recurrent state, in layers that also have attention
    "attn.hook_q",  # [B, T, H, D] after norms and RoPE, like k
    "attn.hook_k",  # [B, T, K, D]
    "attn.hook_v",  # [B, T, K, D]
    "attn.hook_pattern",  # float32[B, H, T, T]
    "attn.hook_z",  # [B, T, H, D] the weighted sums of values
    "hook_attn_out",  # [B, T, E] the output of attention, or of the recurrent state
    "hook_mlp_out",  # [B, T, E] the output of the MLP
    "hook_resid_post",  # [B, T, E] the output of the layer
)
# Attributes of layers: attention, a recurrent state or an MLP, or whichever of them is the only one.
_MODULES = ("self_attn", "linear_attn", "mamba", "conv", "mlp", "mixer")
LAST_POINT = "ln_final.hook_normalized"


def points(config: ModelConfig) -> list[str]:
    """All names for a model, in the order of computation. Mixtures of experts have no `hook_mlp_out`, layers that read
    the keys and values of earlier ones no hooks for these, and layers with a recurrent state none inside attention.
    Layers with either attention or an MLP have no hooks of the other, and only those with both attention and a
    recurrent state have `hook_state_out`. Of latent attention K is 1, and values inside are of latents, as
    `latent_attention` computes them. Keys of Falcon-H1 are without `key_multiplier`.
    """
    sizes, of_experts = config.recurrent, () if config.experts is None else config.experts.layers

    def missing(index: int) -> set[str]:
        has_both = sizes is not None and sizes.beside_attention and index in sizes.layers
        found: set[str] = set() if has_both else {"hook_state_out"}
        mixer = config.mixers[index] if config.mixers is not None else None
        if index in of_experts or mixer in ("attention", "recurrence"):
            found |= {"hook_mlp_out"}
        if mixer == "mlp":
            found |= {"hook_attn_out"}
        if index not in config.attention_layers:
            return found | {name for name in _OF_A_BLOCK if name.startswith("attn.")}
        return found | ({"attn.hook_k", "attn.hook_v"} if index not in config.kv_layers else set())

    blocks = [
        f"blocks.{index}.{name}"
        for index in range(config.num_layers)
        for name in _OF_A_BLOCK
        if name not in missing(index)
    ]
    return [*blocks, LAST_POINT]


def matching(pattern: str, known: Sequence[str]) -> list[str]:
    """The names that match. Raises ValueError if there are none."""
    found = [name for name in known if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"no point is called {pattern!r}; there are {', '.join(known[:10])}, ...")
    return found


def residual_points(config: ModelConfig, patterns: Sequence[str]) -> tuple[str, ...]:
    """The matching names with values [..., T, E], in order. Raises ValueError for others."""
    known = points(config)
    wanted = {name for pattern in patterns for name in matching(pattern, known)}
    inside = [name for name in known if name in wanted and ".attn." in name]
    if inside:
        raise ValueError(
            f"the engine has no point {inside[0]}: values inside attention are for jaxpage.research.run_with_hooks"
        )
    return tuple(name for name in known if name in wanted)


def tapped(module: CausalLM, tap: Tap) -> CausalLM:
    """A copy that shares the module's arrays, for one trace. Its layers, attention and MLPs pass values to `tap`.

    Points inside attention belong to its argument, and the last one to the caller of `hidden_states`.
    """
    copy = nnx.merge(*nnx.split(module))
    decoder: Any = copy.model
    for index, layer in enumerate(decoder.layers):
        name, mixers = f"blocks.{index}.hook_", copy.config.mixers
        for attribute in _MODULES:
            part = getattr(layer, attribute, None)
            if part is None or isinstance(part, MixtureOfExperts):
                continue
            is_mlp = attribute == "mlp" or (mixers is not None and mixers[index] == "mlp")
            has_both = attribute == "mamba" and hasattr(layer, "self_attn")
            after = f"{name}mlp_out" if is_mlp else f"{name}attn_out"
            after = f"{name}state_out" if has_both else after
            setattr(layer, attribute, _Tapped(part, tap, "", after))
        decoder.layers[index] = _Tapped(layer, tap, f"{name}resid_pre", f"{name}resid_post")
    return copy


class _Tapped(nnx.Module):
    """A module whose first argument and result pass through taps; "" is none."""

    def __init__(self, module: nnx.Module, tap: Tap, before: str, after: str):
        self._module, self._tap = module, nnx.static(tap)
        self._before, self._after = before, after

    def __call__(self, x: jax.Array, *rest: Any, **more: Any) -> jax.Array:
        if self._before:
            x = self._tap(self._before, x)
        result = self._module(x, *rest, **more)  # pyright: ignore[reportCallIssue]
        return self._tap(self._after, result) if self._after else result
