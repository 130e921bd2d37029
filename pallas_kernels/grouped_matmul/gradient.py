"""The gradient of the grouped product, in plain XLA.

Kernels have none, and a loop with a dynamic number of iterations does not support reverse-mode differentiation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.xla import TILE_ROWS


def gradient(
    x: Float[Array, "T E"],
    weights: Float[Array, "G F E"],
    group_sizes: Int[Array, " G"],
    slopes: Float[Array, "T F"],
) -> tuple[Float[Array, "T E"], Float[Array, "G F E"]]:
    """The gradients of x and the weights, in their dtypes, given `slopes`, the gradient of the product.

    Sums are float32. Rows without a group have gradient 0, whatever their `slopes`.
    """
    tile = TILE_ROWS
    group_ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    tile_ends = jnp.cumsum(-(-group_sizes // tile), dtype=jnp.int32)
    padding = ((0, tile), (0, 0))
    rows_in, slopes_in = (jnp.pad(a.astype(jnp.float32), padding) for a in (x, slopes))
    of_rows = jnp.zeros(rows_in.shape, jnp.float32)
    of_weights = jnp.zeros(weights.shape, jnp.float32)

    def turn(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_rows, of_weights = sums
        group = jnp.searchsorted(tile_ends, index, side="right", method="compare_all")
        end = group_ends[group]
        number = index - (tile_ends[group] - -(-group_sizes[group] // tile))
        first = end - group_sizes[group] + number * tile
        inside = (first + jnp.arange(tile, dtype=jnp.int32) < end)[:, None]
        rows, slopes = (
            jnp.where(inside, lax.dynamic_slice_in_dim(a, first, tile), 0.0)
            for a in (rows_in, slopes_in)
        )
        old = lax.dynamic_slice_in_dim(of_rows, first, tile)
        new = jnp.where(inside, slopes @ weights[group].astype(jnp.float32), old)
        of_rows = lax.dynamic_update_slice_in_dim(of_rows, new, first, 0)
        return of_rows, of_weights.at[group].add(slopes.T @ rows)

    sums = lax.fori_loop(0, tile_ends[-1], turn, (of_rows, of_weights))
    return sums[0][: x.shape[0]].astype(x.dtype), sums[1].astype(weights.dtype)
