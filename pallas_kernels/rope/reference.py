"""The definition of rotary embeddings: plain jnp. (Su et al., arXiv:2104.09864.)

Letters: T tokens, N heads, D their dimensions, half: pairs of dimensions that are turned.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def rotate(
    parts: Sequence[Float[Array, "... T N D"]],
    cos: Float[Array, "... T 1 half"],
    sin: Float[Array, "... T 1 half"],
    *,
    interleaved: bool = False,
) -> list[Float[Array, "... T N D"]]:
    """Arrays of heads rotated in pairs (d, d + half), the Hugging Face convention; dimensions after 2 * half pass.

    `interleaved`: in pairs (2 d, 2 d + 1), as transformers' GLM and Cohere. N may differ between arrays.
    """
    return [_rotate(x, cos, sin, interleaved) for x in parts]


def split_and_rotate(
    joined: Float[Array, "... T N*D"],
    cos: Float[Array, "... T 1 half"],
    sin: Float[Array, "... T 1 half"],
    *,
    heads: tuple[int, int, int],
    interleaved: bool = False,
) -> list[Float[Array, "... T N D"]]:
    """Queries, keys and values, that many heads of each side by side: the former two rotated, values as they are."""
    *turned, values = split(joined, heads)
    return [*rotate(turned, cos, sin, interleaved=interleaved), values]


def split(
    joined: Float[Array, "... T N*D"], heads: Sequence[int]
) -> list[Float[Array, "... T N D"]]:
    """Arrays of so many heads that are side by side."""
    head_dim = joined.shape[-1] // sum(heads)
    ends = np.cumsum(heads)[:-1] * head_dim
    parts = jnp.split(joined, ends, axis=-1)
    return [x.reshape(*x.shape[:-1], -1, head_dim) for x in parts]


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool) -> jax.Array:
    half = cos.shape[-1]
    if interleaved:
        pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
        first, second, rest = pairs[..., 0], pairs[..., 1], x[..., 2 * half :]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = turned.reshape(*x.shape[:-1], 2 * half)
        return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*rotated, rest] if rest.shape[-1] else rotated, axis=-1)
