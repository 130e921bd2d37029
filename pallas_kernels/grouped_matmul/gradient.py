"""The gradient of the grouped product, in plain XLA.

Kernels have none, and a loop with a dynamic number of iterations does not support reverse-mode differentiation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.xla import PADDING, TILE_ROWS, RowTiles


def gradient(
    x: Float[Array, "T E"],
    weights: Float[Array, "G F E"],
    group_sizes: Int[Array, " G"],
    slopes: Float[Array, "T F"],
) -> tuple[Float[Array, "T E"], Float[Array, "G F E"]]:
    """The gradients of x and the weights, in their dtypes, given `slopes`, the gradient of the product.

    Sums are float32. Rows without a group have gradient 0, whatever their `slopes`.
    """
    tiles = RowTiles(group_sizes)
    rows_in, slopes_in = (jnp.pad(a.astype(jnp.float32), PADDING) for a in (x, slopes))
    of_rows = jnp.zeros(rows_in.shape, jnp.float32)
    of_weights = jnp.zeros(weights.shape, jnp.float32)

    def turn(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_rows, of_weights = sums
        group, first, inside = tiles.at(index)
        inside = inside[:, None]
        rows, slopes = (
            jnp.where(inside, lax.dynamic_slice_in_dim(a, first, TILE_ROWS), 0.0)
            for a in (rows_in, slopes_in)
        )
        old = lax.dynamic_slice_in_dim(of_rows, first, TILE_ROWS)
        new = jnp.where(inside, slopes @ weights[group].astype(jnp.float32), old)
        of_rows = lax.dynamic_update_slice_in_dim(of_rows, new, first, 0)
        return of_rows, of_weights.at[group].add(slopes.T @ rows)

    sums = lax.fori_loop(0, tiles.count, turn, (of_rows, of_weights))
    return sums[0][: x.shape[0]].astype(x.dtype), sums[1].astype(weights.dtype)
