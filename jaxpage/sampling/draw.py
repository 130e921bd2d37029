"""Draws tokens by Gumbel-max: the largest of logit + noise is a draw from the softmax of the logits.

Noise for each token of a large vocabulary would cost more than all the rest of the sampler. So a row draws among the
few tokens that top-k, top-p or min_p leaves, if they are known; and otherwise twice, a group of 128 tokens and then one
of them. The probability of a group is the sum of its tokens' probabilities, so the distribution is the same.

A row's token depends on its own logits, parameters and key alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpage.sampling.keys import GROUPS, TOKENS, Keys, gumbel_noise
from jaxpage.sampling.row_ops import argmax

_GROUP = 128  # tokens; a vocabulary of 151,936 has 1187 groups


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Distributions:
    """softmax(logits / temperature) of each row's tokens with a logit of at least `lowest`, and its noise."""

    # float32[R], the largest logits; a row where that is not finite gets some token
    best: jax.Array
    lowest: jax.Array  # float32[R]
    temperature: jax.Array  # float32[R], positive
    keys: Keys

    def exponents(self, logits: jax.Array, height: int | None = None) -> jax.Array:
        """Logarithms of the odds against the best token, of the shape of logits; -inf for dropped tokens.

        logits: float32[R, N], or tiles of `height` rows, float32[R / height, groups, height, N].
        """
        shape = (-1, 1) if height is None else (-1, 1, height, 1)
        best, lowest, scale = (
            x.reshape(shape) for x in (self.best, self.lowest, 1 / self.temperature)
        )
        return jnp.where(logits >= lowest, (logits - best) * scale, -jnp.inf)

    def noise(self, words: jax.Array, stream: int) -> jax.Array:
        return gumbel_noise(self.keys, words, stream)


@jax.jit
def draw(logits: jax.Array, rows: Distributions) -> jax.Array:
    """int32[R]: a token of each row, from logits, float32[R, V]."""
    vocab_size = logits.shape[1]
    padded = jnp.pad(logits, ((0, 0), (0, -vocab_size % _GROUP)), constant_values=-jnp.inf)
    token_ids = lax.platform_dependent(
        padded,
        tpu=partial(_draw_by_groups, rows=rows, height=math.gcd(8, logits.shape[0])),
        default=partial(_draw_by_groups, rows=rows, height=1),
    )
    return jnp.minimum(token_ids, vocab_size - 1)  # which the padding exceeds if there is NaN


@jax.jit
def draw_among(logits: jax.Array, ids: jax.Array, rows: Distributions) -> jax.Array:
    """int32[R]: one of ids, int32[R, N], by their logits, float32[R, N]. The order of the N tokens does not matter."""
    index = argmax(rows.exponents(logits) + rows.noise(ids, TOKENS))
    return jnp.take_along_axis(ids, index[:, None], axis=1)[:, 0]


def _draw_by_groups(logits: jax.Array, *, rows: Distributions, height: int) -> jax.Array:
    """`draw` from whole groups.

    On a TPU, 8 rows of a group are one tile in its memory. Seen as tiles of this height, logits need not be rearranged,
    neither to sum up groups nor to pick some.
    """
    num_rows, width = logits.shape
    tiles = logits.reshape(-1, height, width // _GROUP, _GROUP).swapaxes(1, 2)
    mass = jnp.exp(rows.exponents(tiles, height)).sum(-1)
    mass = mass.swapaxes(1, 2).reshape(num_rows, -1)
    numbers = lax.broadcasted_iota(jnp.int32, mass.shape, 1)
    group = argmax(jnp.log(mass) + rows.noise(numbers, GROUPS))
    row = jnp.arange(num_rows, dtype=jnp.int32)
    tile = tiles.reshape(-1, height, _GROUP)[row // height * mass.shape[1] + group]
    own = jnp.take_along_axis(tile, (row % height)[:, None, None], axis=1)[:, 0]
    ids = group[:, None] * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)[None]
    return draw_among(own, ids, rows)
