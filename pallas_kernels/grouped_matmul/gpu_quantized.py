"""The grouped product with quantized weights for Hopper GPUs, for rows that are not rounded: `gpu.py` chooses it.

As in `quant_matmul/gpu.py`, a program multiplies ROWS outputs of an expert, which are converted in registers, with a
tile of rows, and sums over all inputs in order: a row's result depends only on the row and its expert. Programs of the
same outputs run at about the same time: of the tiles of an expert the first reads its weights from memory, the others
from L2.

A tile begins at a multiple of ALIGNED rows, so it may have rows of other experts. All its results are written to a
place of its own, from where XLA takes those of each row, in the pass that sets rows without an expert to 0.

Letters: T rows, G groups (experts), E inputs, F outputs, J groups of inputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.gpu_rows import ALIGNED, Tiles, groups_of, tiles_of
from pallas_kernels.quant_matmul.gpu_tile import (
    CHUNK,
    ROWS,
    Memory,
    Operands,
    along,
    memory_of,
    multiplication,
    operands_of,
    sum_of_chunks,
)
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, padded
from pallas_kernels.wgmma import Ref, piece

# Of a program's stages, so that two share an SM, which has 228 KiB: one converts while the other multiplies.
SMEM_KIB, MOST_STAGES = 112, 6


def grouped_matmul(
    x: jax.Array, weights: QuantizedWeight, group_sizes: jax.Array, interpret: Any
) -> jax.Array:
    """`reference.grouped_matmul` of bfloat16 x [T, E] and weights [G, F, E]: float32[T, F]."""
    num_rows, x = x.shape[0], padded(x, weights)
    # Columns of float32 sums that fit in registers; with groups there are sums of a group, too.
    most = 64 if weights.has_groups else 128
    average = -(-num_rows // weights.shape[0])
    tile = next(n for n in (16, 32, 64, 128) if n >= min(average + ALIGNED, most))
    x = jnp.pad(x, ((0, max(tile - num_rows, -num_rows % ALIGNED)), (0, 0)))
    tiles = tiles_of(group_sizes, num_rows, tile)
    out = _call(x, weights, tiles, tile, interpret)
    return _of_rows(out, group_sizes, num_rows, x.shape[0], tile)


def _of_rows(
    out: jax.Array, group_sizes: jax.Array, num_rows: int, padded_rows: int, tile: int
) -> jax.Array:
    """[T, F] of the results of all tiles."""
    groups = groups_of(group_sizes, tile)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    group = jnp.searchsorted(groups.end, row, side="right", method="compare_all")
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    number = (row - groups.begin[group]) // tile
    begin = jnp.minimum(groups.begin[group] + number * tile, padded_rows - tile)
    first_tile = jnp.cumsum(groups.num_tiles, dtype=jnp.int32) - groups.num_tiles
    at = (first_tile[group] + number) * tile + row - begin
    found = out.at[at].get(mode="clip")
    return jnp.where(row[:, None] < groups.end[-1], found, 0.0)


def _call(
    x: jax.Array, weights: QuantizedWeight, tiles: Tiles, tile: int, interpret: Any
) -> jax.Array:
    """float32[tiles * tile, F]; what belongs to no tile with rows is uninitialized."""
    num_rows, (_, num_out, width) = x.shape[0], weights.data.shape
    operands, num_tiles = operands_of(x, weights), tiles.group.shape[0]
    scale_of_outputs = None if weights.has_groups else weights.scale
    options = {"smem_kib": SMEM_KIB, "most_stages": MOST_STAGES, "interpret": interpret}

    def body(refs: Operands, scale_ref, tiles: Tiles, out_ref: Ref, memory: Memory):
        index, rows = lax.axis_index("tile"), piece(lax.axis_index("rows"), ROWS)
        group, multiply = (
            tiles.group[index],
            multiplication(weights, x.dtype, memory.wide, interpret),
        )
        # A tile that would end after the last row begins earlier, with rows that are not its own.
        begin = pl.multiple_of(jnp.minimum(tiles.begin[index], num_rows - tile), ALIGNED)

        @pl.when(tiles.first[index] < tiles.end[index])
        def _():
            place = {"tokens": pl.ds(begin, tile), "rows": rows, "expert": (group,)}
            chunks = jnp.int32(0), jnp.int32(width // CHUNK)
            out = sum_of_chunks(refs, memory, multiply, chunks=chunks, **place)
            if scale_ref is not None:
                out = out * along(scale_ref.at[group, rows], out.shape, 0)
            to_memory = out_ref.at[piece(index, tile), rows].transpose((1, 0))
            # In the transposed layout a thread's pairs of values are along outputs, as in memory.
            to_memory[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tiles * tile, num_out), jnp.float32),
        grid=(num_out // ROWS, num_tiles),
        grid_names=("rows", "tile"),
        scratch_types=(memory_of(operands, weights, tile, **options),),
        interpret=interpret,
        kernel_name="grouped_matmul",
    )
    return kernel(operands, scale_of_outputs, tiles)
