"""The grouped product on TPUs: JAX's megablox kernel, which takes weights as they are, with tiles for these sizes.

(Gale et al., MegaBlocks, arXiv:2211.15841.) A tile of rows is multiplied with each expert that has rows in it, so an
expert's weights are read once for each tile that it touches: with few rows once, whatever the tile; with many rows
larger tiles read them less often.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128
WIDEST = 1024  # inputs and outputs of a tile of weights: 2 MB, of which two are there at once
FEW_ROWS, MANY_ROWS = 128, 512  # of a tile


def grouped_matmul(
    x: Float[Array, "T E"],
    weights: Float[Array, "G F E"],
    group_sizes: Int[Array, " G"],
    *,
    interpret: bool = False,
) -> Float[Array, "T F"]:
    """`reference.grouped_matmul`; products and sums in float32."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    num_rows, num_outputs = x.shape[0], weights.shape[1]
    tile = FEW_ROWS if num_rows <= 16 * FEW_ROWS else MANY_ROWS
    out = gmm(
        jnp.pad(x, ((0, -num_rows % tile), (0, 0))),
        weights,
        group_sizes,
        preferred_element_type=jnp.float32,
        tiling=(tile, _width(x.shape[1]), _width(num_outputs)),
        transpose_rhs=True,
        interpret=interpret,
    )[:num_rows]
    is_row = jnp.arange(num_rows, dtype=jnp.int32) < group_sizes.sum(dtype=jnp.int32)
    return jnp.where(is_row[:, None], out, 0.0)  # tiles of no group are not written


def _width(size: int) -> int:
    """The widest tile, in whole registers, of which there are no more than there must be."""
    num_tiles = -(-size // WIDEST)
    return -(-size // (num_tiles * LANES)) * LANES
