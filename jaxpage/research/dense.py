"""A dense, differentiable call of a module with taps: `run_with_cache` and `run_with_hooks`.

Layers, their attention and their MLP are wrapped in a copy of the module that shares its arrays, for one trace; so
models need no code for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.models.attention import DenseAttention
from jaxpage.models.decoder import CausalLM, check_length
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.taps import LAST_POINT, tapped
from jaxpage.research.hooks import Hook, Names, Taps


def run_with_cache(
    module: CausalLM,
    token_ids: Any,
    names: Names = None,
    *,
    hooks: Sequence[tuple[str, Hook]] = (),
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits float32[B, T, V] of int32[B, T] tokens, or [T, V] of [T], and values inside the model by name.

    `names`: which values to return, as a name, several, patterns such as "blocks.*.hook_resid_post", or a predicate on
    names; None: all of `points(module.config)`. `hooks`: (name or pattern, function of a value and its name), in the
    order of their calls; what a function returns replaces the value. Pure, so it may be jitted, differentiated and
    mapped. Pass vectors that hooks use as arguments of the jitted function, to avoid recompiling.

    Raises ValueError for a name that matches no point, for a hook that returns another shape, and for more tokens than
    the model has learned positions.
    """
    taps = Taps(module.config, hooks, names)
    token_ids = jnp.asarray(token_ids, jnp.int32)
    check_length(module.config, token_ids.shape[-1])
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[-1], dtype=jnp.int32), token_ids.shape)
    inputs = ForwardInput(
        token_ids=token_ids,
        positions=positions,
        attention=_Attention(DenseAttention(positions), taps, module.config.attention_layers),
    )
    copy = tapped(module, taps)
    hidden = taps(LAST_POINT, copy.hidden_states(inputs))
    return copy.logits(hidden), taps.seen


def run_with_hooks(
    module: CausalLM, token_ids: Any, hooks: Sequence[tuple[str, Hook]]
) -> jax.Array:
    """Logits, with values inside the model changed: see `run_with_cache`."""
    return run_with_cache(module, token_ids, (), hooks=hooks)[0]


class _Attention:
    """Dense attention with taps at queries, keys, values, weights and outputs."""

    def __init__(self, dense: DenseAttention, taps: Taps, layers: Sequence[int]):
        self._dense, self._taps = dense, taps
        # `layer` may be an earlier one, whose keys and values a layer reads. Each of these calls once, in order.
        self._layers = iter(layers)
        self._kv: dict[int, tuple[jax.Array, jax.Array]] = {}  # of layers, after their hooks

    def __call__(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
    ) -> jax.Array:
        index = next(self._layers)

        def tap(name: str, value: jax.Array) -> jax.Array:
            return self._taps(f"blocks.{index}.attn.hook_{name}", value)

        q = tap("q", q)
        if index == layer:
            self._kv[layer] = tap("k", k), tap("v", v)
        k, v = self._kv[layer]
        weights = tap("pattern", self._dense.weights(q, k, **options))
        return tap("z", self._dense.combine(weights, v).astype(q.dtype))
