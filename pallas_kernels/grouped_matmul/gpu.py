"""The grouped product for Hopper GPUs (sm_90a) in Mosaic GPU.

Our own kernel, because XLA has none (`xla.py` says what it does instead), and JAX's example, ragged_dot_mgpu, returns
x's dtype and imports jax's tests. A loop in XLA copies an expert's weights for each tile of rows that it multiplies and
waits for the host to count iterations; here weights are read once for each tile that uses them, by TMA directly from
their place, and the tiles of all experts run in parallel.

A program has a tile of rows of one group, wgmma's rows, and a tile of outputs. It sums over the inputs in order,
whatever else is in the batch: a row's result depends only on the row and its expert. Rows of other groups in a tile are
multiplied too, but not stored. With few rows the weights' bytes are the bound: to saturate an H200's memory, 36 KB must
be in flight per SM; two programs per SM with three stages ahead have 96.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.wgmma import tiled

COLUMNS = 128  # outputs of a program, or twice as many
DEPTH = 64  # inputs of a stage: 128 bytes, the widest swizzle
STORED = 32  # outputs stored at once
ALIGNED = 8  # rows: tiles begin at multiples of it, as the swizzled tiles in shared memory do


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may depend on the kind of device (`tune.py`); no result depends on it.

    few_rows: with up to so many rows per group, on average, a program has a tile of 64 rows, few_columns outputs (128,
    or 256 if the outputs are a multiple) and few_stages; with more rows a tile of 128 rows, 128 outputs and
    many_stages. The defaults take 104 and 112 KB of shared memory: two programs per SM.
    """

    few_rows: int = 64
    few_stages: int = 4
    few_columns: int = 128
    many_stages: int = 3

    def __post_init__(self):
        if min(self.few_stages, self.many_stages) < 2:
            raise ValueError(f"{self}: a stage is filled while another is read, so there are two")


DEFAULT = TileSizes()


def unsupported_reason(x: jax.Array, weights: jax.Array) -> str | None:
    """Why the kernel does not support these arguments, in one line; None if it does. Needs only shapes and dtypes."""
    if reason := unsupported_jax():
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        return f"x is {x.dtype} and the weights {weights.dtype}; they must be bfloat16 or float16, and the same"
    _, num_outputs, num_inputs = weights.shape
    if num_inputs % DEPTH or num_outputs % COLUMNS:
        return (
            f"weights of {num_outputs} outputs and {num_inputs} inputs; they must be multiples of "
            f"{COLUMNS} and {DEPTH}"
        )
    return None


def grouped_matmul(
    x: Float[Array, "T E"],
    weights: Float[Array, "G F E"],
    group_sizes: Int[Array, " G"],
    *,
    sizes: TileSizes = DEFAULT,
    interpret: Any = None,
) -> Float[Array, "T F"]:
    """`reference.grouped_matmul`; sums in float32. Raises NotImplementedError with `unsupported_reason`'s reason.

    `interpret`: `plgpu.InterpretGPUParams` (jax >= 0.11.2), or None to compile.
    """
    if reason := unsupported_reason(x, weights):
        raise NotImplementedError(reason)
    num_rows, (num_groups, num_outputs, _) = x.shape[0], weights.shape
    tile, num_columns, num_stages = 128, COLUMNS, sizes.many_stages
    if num_rows <= sizes.few_rows * num_groups:
        num_columns = COLUMNS if num_outputs % sizes.few_columns else sizes.few_columns
        tile, num_stages = 64, sizes.few_stages
    padding = max(tile - num_rows, -num_rows % ALIGNED)
    x = jnp.pad(x, ((0, padding), (0, 0)))
    tiles = _tiles(group_sizes, num_rows, tile)
    out = _call(x, weights, tiles, (tile, num_columns), num_stages, interpret)
    is_row = jnp.arange(num_rows, dtype=jnp.int32) < group_sizes.sum(dtype=jnp.int32)
    return jnp.where(is_row[:, None], out[:num_rows], 0.0)  # rows without a group are not written


def _tiles(group_sizes: jax.Array, num_rows: int, tile: int) -> tuple[jax.Array, ...]:
    """For each tile its group, its start, and its group's rows in it, [first, end); surplus tiles have none."""
    num_groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    firsts = ends - group_sizes
    begins = firsts // ALIGNED * ALIGNED
    counts = jnp.where(group_sizes > 0, -(-(ends - begins) // tile), 0)
    tile_ends = jnp.cumsum(counts, dtype=jnp.int32)
    most_groups = min(num_groups, num_rows)
    most = (num_rows + most_groups * (ALIGNED - 1)) // tile + most_groups
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(tile_ends, index, side="right", method="compare_all")
    group = jnp.minimum(group, num_groups - 1).astype(jnp.int32)
    begin = begins[group] + (index - (tile_ends - counts)[group]) * tile
    first, end = jnp.maximum(firsts[group], begin), jnp.minimum(ends[group], begin + tile)
    return group, begin, first, end


def _call(x, weights, tiles, shape: tuple[int, int], num_stages: int, interpret: Any) -> jax.Array:
    """float32[T, F]; rows without a tile are uninitialized. shape: rows and outputs of a program."""
    (num_rows, num_inputs), (tile, num_columns) = x.shape, shape
    num_outputs, num_turns = weights.shape[1], num_inputs // DEPTH
    num_stages = min(num_stages, num_turns)

    def body(*refs):
        x_ref, weights_ref, group_ref, begin_ref, first_ref, end_ref, out_ref, *memory = refs
        x_smem, weights_smem, out_smem, ready = memory
        index, column = lax.axis_index("tile"), lax.axis_index("column") * num_columns
        group, first, end = group_ref[index], first_ref[index], end_ref[index]
        # A tile that would end after the last row begins earlier, with rows that are not its own.
        row = pl.multiple_of(jnp.minimum(begin_ref[index], num_rows - tile), ALIGNED)
        columns = pl.ds(pl.multiple_of(column, num_columns), num_columns)

        def fetch(turn, stage):
            inputs = pl.ds(pl.multiple_of(turn * DEPTH, DEPTH), DEPTH)
            rows = x_ref.at[pl.ds(row, tile), inputs]
            plgpu.copy_gmem_to_smem(rows, x_smem.at[stage], ready.at[stage])
            of_group = weights_ref.at[group, columns, inputs]
            plgpu.copy_gmem_to_smem(of_group, weights_smem.at[stage], ready.at[stage])

        def multiply(acc):
            def step(turn, _):
                stage = lax.rem(turn, jnp.int32(num_stages))
                plgpu.barrier_wait(ready.at[stage])
                plgpu.wgmma(acc, x_smem.at[stage], weights_smem.at[stage].transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the previous one has read its stage
                before = turn - 1

                @pl.when((turn > 0) & (before + num_stages < num_turns))
                def _():
                    fetch(before + num_stages, lax.rem(before, jnp.int32(num_stages)))

            lax.fori_loop(0, num_turns, step, None)
            return acc[...]

        @pl.when(first < end)
        def _():
            for stage in range(num_stages):
                fetch(jnp.int32(stage), stage)
            acc = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            for part in range(0, num_columns, STORED):
                out_smem[...] = acc[:, part : part + STORED]
                plgpu.commit_smem()
                at = pl.ds(pl.multiple_of(column + part, STORED), STORED)
                _store(out_smem, out_ref, (row, first, end), at)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_outputs), jnp.float32),
        # Programs with the same weights run at about the same time: the second reads them from L2.
        grid=(num_outputs // num_columns, tiles[0].shape[0]),
        grid_names=("column", "tile"),
        scratch_types=(
            tiled(num_stages, tile, DEPTH, dtype=x.dtype, swizzle=128),
            tiled(num_stages, num_columns, DEPTH, dtype=x.dtype, swizzle=128),
            plgpu.SMEM((tile, STORED), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        ),
        interpret=interpret,
    )
    return kernel(x, weights, *tiles)


def _store(smem, out_ref, rows, columns):
    """`rows`: where the tile begins, and which rows are its own, [first, end)."""
    row, first, end = rows
    tile = smem.shape[0]

    def store(first, num_rows):
        out = out_ref.at[pl.ds(row + first, num_rows), columns]
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(first, num_rows)], out)

    pl.when(end - first == tile)(lambda: store(0, tile))

    @pl.when(end - first < tile)
    def _():
        lax.fori_loop(first - row, end - row, lambda i, _: store(i, 1), None)

    plgpu.wait_smem_to_gmem(0)
