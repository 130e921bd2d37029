"""The grouped product on TPUs: JAX's megablox kernel, which supports our weight layout, with tiles for these sizes.

(Gale et al., MegaBlocks, arXiv:2211.15841.) A tile of rows is multiplied with each expert that has rows in it, so an
expert's weights are read once per tile that includes its rows: with few rows once, whatever the tile; with many rows
larger tiles read them less often.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128
WIDEST = 2048  # bytes of inputs in a tile. Sums are divided there, so it is never tuned


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may depend on the kind of device (`tune.py`); no result depends on it.

    few_rows: with up to so many rows in all, tiles have few_tile rows, with more many_tile, both a multiple of 16.
    outputs: most outputs in a tile of weights, which by default has 2 MB and two buffers; half as many for float32.
    """

    few_rows: int = 2048
    few_tile: int = 128
    many_tile: int = 512
    outputs: int = 1024


DEFAULT = TileSizes()


def grouped_matmul(
    x: Float[Array, "T E"],
    weights: Float[Array, "G F E"],
    group_sizes: Int[Array, " G"],
    *,
    sizes: TileSizes = DEFAULT,
    interpret: bool = False,
) -> Float[Array, "T F"]:
    """`reference.grouped_matmul`; sums in float32. Products of float32 have the precision of
    `jax.default_matmul_precision`.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    num_rows, (_, num_outputs, num_inputs) = x.shape[0], weights.shape
    tile = sizes.few_tile if num_rows <= sizes.few_rows else sizes.many_tile
    inputs = _width(num_inputs, WIDEST // x.dtype.itemsize)
    outputs = _width(num_outputs, sizes.outputs * 2 // x.dtype.itemsize)
    out = gmm(
        jnp.pad(x, ((0, -num_rows % tile), (0, 0))),
        weights,
        group_sizes,
        preferred_element_type=jnp.float32,
        tiling=(tile, inputs, outputs),
        transpose_rhs=True,
        interpret=interpret,
    )[:num_rows]
    is_row = jnp.arange(num_rows, dtype=jnp.int32) < group_sizes.sum(dtype=jnp.int32)
    return jnp.where(is_row[:, None], out, 0.0)  # tiles without a group are not written


def _width(size: int, most: int) -> int:
    """The narrowest multiple of LANES with the least number of tiles."""
    num_tiles = -(-size // most)
    return -(-size // (num_tiles * LANES)) * LANES
