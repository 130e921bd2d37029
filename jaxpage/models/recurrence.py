"""What layers with a recurrent state are given in place of attention, and its implementation for whole sequences.

The paged step hands a model a recurrence that keeps the state of each running sequence; trainers and tests need none.
Must not know slots or batches.

Letters: T tokens, C channels, W taps, N key heads, J value heads for each key head, F value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.delta_rule import AnyTokens, whole


class Recurrence(Protocol):
    """What a layer computes from each token and the sequence's state after the token before."""

    def convolve(
        self, layer: int, inputs: Sequence[jax.Array], weights: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """A causal convolution of each channel: sum over w of weight[:, W - 1 - w] times x of w tokens before.

        inputs: of several kinds, each [..., T, C], and weights [C, W]. Returns float32[..., T, C] of each kind.
        """
        ...

    def advance(self, layer: int, tokens: AnyTokens) -> jax.Array:
        """The outputs of the tokens, which change the state: float32[..., T, N, J, F], of Mamba-2 [..., T, N, J F], see
        `ops.delta_rule`. tokens have the axes [..., T]. Not for layers that have only a convolution.
        """
        ...


class WholeSequences:
    """The tokens of each sequence from the first one on, without a state before them. Differentiable."""

    def __init__(self, is_token: jax.Array | None = None):
        # bool[..., T]; the others are padding, before and after the tokens of a sequence. None: no padding.
        self.is_token = is_token

    def convolve(
        self, layer: int, inputs: Sequence[jax.Array], weights: Sequence[jax.Array]
    ) -> list[jax.Array]:
        del layer
        return [self._convolved(x, weight) for x, weight in zip(inputs, weights, strict=True)]

    def _convolved(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        x, num_taps = self._masked(x.astype(jnp.float32)), weight.shape[1]
        num_tokens, axis = x.shape[-2], x.ndim - 2
        padding = [(0, 0)] * x.ndim
        padding[axis] = (num_taps - 1, 0)
        x = jnp.pad(x, padding)
        taps = jnp.expand_dims(weight.astype(jnp.float32).T, range(1, axis + 2))  # [W, ..., C]
        return sum(
            (
                jax.lax.slice_in_dim(x, tap, tap + num_tokens, axis=axis) * taps[tap]
                for tap in range(num_taps)
            ),
            start=jnp.float32(0),
        )

    def advance(self, layer: int, tokens: AnyTokens) -> jax.Array:
        del layer
        tokens = jax.tree.map(self._masked, tokens)
        lead = tokens.log_decay.shape[:-3]
        flat = jax.tree.map(lambda x: x.reshape(int(np.prod(lead)), *x.shape[len(lead) :]), tokens)
        out = whole(flat)
        return out.reshape(*lead, *out.shape[1:])

    def _masked(self, x: jax.Array) -> jax.Array:
        if self.is_token is None:
            return x
        missing = x.ndim - self.is_token.ndim
        return jnp.where(self.is_token.reshape(*self.is_token.shape, *[1] * missing), x, 0)
