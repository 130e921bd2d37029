"""The grouped product in plain XLA: a loop over tiles of rows, each of one group; `reference.py` defines it.

Quantized weights are converted in the loop, so memory has at most one expert's as floats. A tile always has as many
rows, so XLA has one product for all of them, and a row's result depends only on the row and its expert.

Not `lax.ragged_dot_general`, which XLA does not support natively on CPUs and GPUs: it multiplies every row with every
expert and masks. For 128 experts of 2048 x 768 and 16,384 rows that is 128 times the flops and, compiled for an H200,
9.0 GB of temporaries; 0.7 GB for 512 rows (tests/aot/test_grouped_matmul.py measures both). TPUs support it, but for
weights [G, E, F]: ours, in Linear's layout, would be transposed and copied in each call (403 MB).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels.quant_matmul import xla as quant_matmul_xla
from pallas_kernels.quant_matmul.quantized import QuantizedWeight

# In decode steps an expert has a few rows; larger tiles help only for long prompts.
TILE_ROWS = 32
# Of rows, so that no slice would reach past the end, where its start would be clamped.
PADDING = ((0, TILE_ROWS), (0, 0))
_LAST = (((1,), (1,)), ((), ()))


def grouped_matmul(
    x: Real[Array, "T E"],
    weights: Real[Array, "G F E"] | QuantizedWeight,
    group_sizes: Int[Array, " G"],
    *,
    row_scale: Float[Array, "T 1"] | None = None,
) -> Float[Array, "T F"]:
    """Same contract as `reference.grouped_matmul`."""
    num_rows, tiles = x.shape[0], RowTiles(group_sizes)
    x = jnp.pad(x, PADDING)
    if row_scale is not None:
        row_scale = jnp.pad(row_scale, PADDING)
    out = jnp.zeros((x.shape[0], weights.shape[1]), jnp.float32)

    def turn(index: jax.Array, out: jax.Array) -> jax.Array:
        group, first, inside = tiles.at(index)
        rows = lax.dynamic_slice_in_dim(x, first, TILE_ROWS)
        scale = row_scale
        if scale is not None:
            scale = lax.dynamic_slice_in_dim(scale, first, TILE_ROWS)
        product = _product(rows, weights[group], scale)
        old = lax.dynamic_slice_in_dim(out, first, TILE_ROWS)
        product = jnp.where(inside[:, None], product, old)
        return lax.dynamic_update_slice_in_dim(out, product, first, 0)

    return lax.fori_loop(0, tiles.count, turn, out)[:num_rows]


def _product(
    x: jax.Array, weight: jax.Array | QuantizedWeight, row_scale: jax.Array | None
) -> jax.Array:
    """float32[TILE_ROWS, F], of one group."""
    if not isinstance(weight, QuantizedWeight):
        return lax.dot_general(x, weight, _LAST, preferred_element_type=jnp.float32)
    if row_scale is None:
        return quant_matmul_xla.quant_matmul(x, weight)
    sums = lax.dot_general(x, weight.data, _LAST, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32) * row_scale * weight.scale[None]


class RowTiles:
    """The tiles of all groups, in order; each begins with the group's first row or after the tile before."""

    def __init__(self, group_sizes: Int[Array, " G"]):
        self._sizes, self._counts = group_sizes, -(-group_sizes // TILE_ROWS)
        self._group_ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
        self._tile_ends = jnp.cumsum(self._counts, dtype=jnp.int32)
        self.count = self._tile_ends[-1]

    def at(self, index: jax.Array) -> tuple[jax.Array, jax.Array, Bool[Array, " TILE_ROWS"]]:
        """A tile's group, its first row, and which of its rows belong to the group."""
        group = jnp.searchsorted(self._tile_ends, index, side="right", method="compare_all")
        end = self._group_ends[group]
        number = index - (self._tile_ends[group] - self._counts[group])
        first = end - self._sizes[group] + number * TILE_ROWS
        return group, first, first + jnp.arange(TILE_ROWS, dtype=jnp.int32) < end
