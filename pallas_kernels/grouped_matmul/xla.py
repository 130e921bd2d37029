"""The grouped product in plain XLA: a loop over tiles of rows, each of one group; `reference.py` defines it.

Not `lax.ragged_dot_general`, which XLA does not support natively on CPUs and GPUs: it multiplies every row with every
expert and masks. For 128 experts of 2048 x 768 and 16,384 rows that is 128 times the flops and, compiled for an H200,
9.0 GB of temporaries; 0.7 GB for 512 rows (tests/aot/test_grouped_matmul.py measures both). TPUs support it, but for
weights [G, E, F]: ours, in Linear's layout, would be transposed and copied in each call (403 MB).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Real

# In decode steps an expert has a few rows; larger tiles help only for long prompts.
TILE_ROWS = 32


def grouped_matmul(
    x: Real[Array, "T E"],
    weights: Real[Array, "G F E"],
    group_sizes: Int[Array, " G"],
    *,
    row_scale: Float[Array, "T 1"] | None = None,
    scale: Float[Array, "G F"] | None = None,
) -> Float[Array, "T F"]:
    num_rows, tile = x.shape[0], TILE_ROWS
    group_ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    tile_ends = jnp.cumsum(-(-group_sizes // tile), dtype=jnp.int32)
    # Padding, so that no slice would reach past the end, where its start would be clamped.
    padding = ((0, tile), (0, 0))
    x = jnp.pad(x, padding)
    if row_scale is not None:
        row_scale = jnp.pad(row_scale, padding)
    dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    out = jnp.zeros((x.shape[0], weights.shape[1]), jnp.float32)

    def turn(index: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(tile_ends, index, side="right", method="compare_all")
        end = group_ends[group]
        number = index - (tile_ends[group] - -(-group_sizes[group] // tile))
        first = end - group_sizes[group] + number * tile
        rows = lax.dynamic_slice_in_dim(x, first, tile)
        product = lax.dot_general(
            rows, weights[group], (((1,), (1,)), ((), ())), preferred_element_type=dtype
        )
        if row_scale is not None and scale is not None:
            scale_of_rows = lax.dynamic_slice_in_dim(row_scale, first, tile)
            product = product.astype(jnp.float32) * scale_of_rows * scale[group][None]
        inside = first + jnp.arange(tile, dtype=jnp.int32) < end
        old = lax.dynamic_slice_in_dim(out, first, tile)
        product = jnp.where(inside[:, None], product, old)
        return lax.dynamic_update_slice_in_dim(out, product, first, 0)

    return lax.fori_loop(0, tile_ends[-1], turn, out)[:num_rows]
