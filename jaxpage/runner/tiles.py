"""A function of tokens, computed a tile at a time, so that the bits of a token do not depend on the company.

XLA chooses kernels and fusions by shapes: a row of a product of 8 rows can differ from the same row of 128 in its last
bits. Here the function is the body of a loop and sees TILE tokens at a time, however many there are. How often the loop
turns is known only on the device, so XLA cannot merge the body with what is around it, and every program has the same
one. Within a body a token's place and its neighbours change no bit, as each row is computed alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

TILE = 32  # tokens
T = TypeVar("T")


def by_tiles(
    function: Callable[..., T],
    num_tokens: jax.Array,
    constants: Any,
    *tokens: jax.Array,
    tile: int = TILE,
) -> T:
    """`function(constants, *tokens)` of the first `num_tokens`, int32[], of all arrays [T, ...]; zeros for the others.

    It gets and returns arrays [tile, ...]. `constants`, a tree of arrays, are what it reads besides tokens.
    """
    total = tokens[0].shape[0]
    padded = [jnp.pad(x, ((0, -total % tile), *[(0, 0)] * (x.ndim - 1))) for x in tokens]
    shapes = jax.eval_shape(
        function, constants, *(jax.ShapeDtypeStruct((tile, *x.shape[1:]), x.dtype) for x in padded)
    )
    empty = jax.tree.map(
        lambda x: jnp.zeros((padded[0].shape[0], *x.shape[1:]), _stored(x.dtype)), shapes
    )

    def one_tile(index: jax.Array, results: Any) -> Any:
        # Tied to the index, constants are no loop invariants: XLA would keep float32 copies of bf16 weights.
        tied, index = lax.optimization_barrier((constants, index))
        own = [lax.dynamic_slice_in_dim(x, index * tile, tile) for x in padded]
        found = function(tied, *own)
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(
                whole, _bits(part), index * tile, 0
            ),
            results,
            found,
        )

    turns = (num_tokens + tile - 1) // tile
    stored = lax.fori_loop(0, turns, one_tile, empty)
    return jax.tree.map(lambda x, shape: _values(x, shape.dtype)[:total], stored, shapes)


def _stored(dtype: Any) -> Any:
    """2-byte floats as their bits: XLA:CPU updates a slice of those in place, and of bf16 by converting all of it."""
    return jnp.uint16 if _is_short_float(dtype) else dtype


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16) if _is_short_float(x.dtype) else x


def _values(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if _is_short_float(dtype) else x


def _is_short_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
