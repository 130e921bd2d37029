"""The router of a mixture of experts: which experts a token goes to, and the share of each.

Attribute paths are the names of the modules in transformers 5.

Letters: T tokens, E model dim, X experts, k experts of a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpage.models.config import ExpertsConfig, ModelConfig
from jaxpage.models.layers import Constant, Linear, Normal, param
from pallas_kernels.matmul.reference import matmul


class Router(Linear):
    """A logit for each expert, and what follows from them; see `config.Routing`."""

    def __init__(self, config: ModelConfig, settings: ExpertsConfig):
        routing = settings.routing
        self.settings = settings
        super().__init__(
            (settings.num_experts, config.hidden_size),
            axes=("router", "embed"),
            bias=settings.bias,
            init=Normal(config.initializer_range),
            dtype=jnp.dtype(jnp.float32) if routing.in_float32 else config.dtype,
        )
        axes = routing.correction_axes
        shape = (*[1] * (axes - 1), settings.num_experts)
        float32 = jnp.dtype(jnp.float32)
        correction = param(shape, axes=("router",) * axes, init=Constant(0.0), dtype=float32)
        self.e_score_correction_bias = correction if routing.has_correction else None

    def choose(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32[T, k] experts of each token [T, E], the most likely first, and float32[T, k] their shares."""
        routing, num_chosen = self.settings.routing, self.settings.experts_per_token
        logits = self._logits(rows)
        has_more = routing.has_correction or routing.num_groups > 1 or routing.factor != 1
        if routing.scores == "softmax" and not has_more:
            best, chosen = jax.lax.top_k(logits, num_chosen)
            # A softmax over the chosen logits equals the softmax over all, divided by the sum of the chosen.
            if self.settings.shares_add_up_to_one:
                return chosen, jax.nn.softmax(best, axis=-1)
            return chosen, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        scores = jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else jax.nn.softmax(logits)
        _, chosen = jax.lax.top_k(self._preferences(scores), num_chosen)
        shares = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.settings.shares_add_up_to_one:
            total = shares.sum(axis=-1, keepdims=True) + routing.added_to_sum
            shares = shares / jnp.maximum(total, routing.least_sum)
        return chosen, shares * routing.factor

    def _logits(self, rows: jax.Array) -> jax.Array:
        """float32[T, X]"""
        weight = self.weight[...]
        if weight.dtype == rows.dtype:
            logits = self.product(rows)
        else:  # some platforms would round a product of two dtypes to the lower one
            logits = matmul(rows, weight)
        return logits if self.bias is None else logits + self.bias[...].astype(logits.dtype)[None]

    def _preferences(self, scores: jax.Array) -> jax.Array:
        """float32[T, X], by which experts are chosen: scores with corrections, -inf in groups that are not chosen."""
        routing = self.settings.routing
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias[...].reshape(1, -1)
        if routing.num_groups == 1:
            return scores
        grouped = scores.reshape(len(scores), routing.num_groups, -1)
        # Two of a group (transformers' Glm4MoeTopkRouter), or one (DeepseekV2TopkRouter).
        best, _ = jax.lax.top_k(grouped, routing.num_best)
        _, chosen = jax.lax.top_k(best.sum(axis=-1), routing.chosen_groups)
        numbers = jnp.arange(routing.num_groups, dtype=chosen.dtype)
        is_chosen = (chosen[..., None] == numbers[None, None]).any(axis=1)
        return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)
