"""Computes a function of tokens one tile at a time, so that a token's bits do not depend on the other tokens.

XLA chooses kernels and fusions by shape: a row of a matmul with 8 rows can differ in its last bits from the same row in
a matmul with 128. Here the function is the body of a loop and sees TILE tokens at a time, however many there are. The
number of iterations is known only on the device, so XLA cannot fuse the body with the surrounding code, and the body is
the same in every program. Within a body a token's position and neighbours do not matter: all rows are computed alike.
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
    """`function(constants, *tokens)` of the first `num_tokens`, int32[], of arrays [T, ...]; zeros for the others.

    The function gets and returns arrays [tile, ...]. `constants` is a tree of the other arrays that it reads.
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
        # Tying constants to the index keeps XLA from hoisting float32 copies of bf16 weights out of the loop.
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
    """uint16 for 2-byte floats: XLA:CPU updates a slice of it in place, but converts a whole bf16 array for that."""
    return jnp.uint16 if _is_short_float(dtype) else dtype


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16) if _is_short_float(x.dtype) else x


def _values(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if _is_short_float(dtype) else x


def _is_short_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
