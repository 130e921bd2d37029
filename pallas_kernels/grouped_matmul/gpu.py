"""The grouped product for Hopper GPUs (sm_90a) in Mosaic GPU.

Our own kernel, because XLA has none (`xla.py` says what it does instead), and JAX's example, ragged_dot_mgpu, returns
x's dtype and imports jax's tests. A loop in XLA copies an expert's weights for each tile of rows that it multiplies and
waits for the host to count iterations; here weights are read once for each tile that uses them, by TMA directly from
their place, and the tiles of all experts run in parallel.

**Tile.** A program is one warpgroup. It multiplies 64 or 128 rows of one group, wgmma's rows, with 128 or 256 outputs,
and sums over the inputs in order, whatever else is in the batch: a row's result depends only on the row and its expert.
Rows of other groups in a tile are multiplied too, but not stored. `gpu_quantized.py` has a kernel for quantized
weights and rows that are not rounded.

**Stages.** Step t multiplies STEP bytes of inputs, which lie in stage t % S of S stages of shared memory. With few rows
the weights' bytes are the bound: to saturate an H200's memory, 36 KB must be in flight per SM; two programs per SM with
three stages ahead have 96.

**Protocol.** The warpgroup starts all copies itself: those for step t in step t - S + 1, the first S before the loop.

    buffer              producer         consumer         barrier                      waits for
    x, weights [t % S]  TMA for step t   wgmma of step t  ready[t % S], 2 arrivals     both copies to arrive
    the same, free      wgmma of step t  TMA for t + S    wgmma_wait(1) in step t + 1  wgmma to have read them
    accumulator         wgmma            warpgroup        implied by reading it        the last wgmma
    out (STORED wide)   warpgroup        TMA to memory    commit_smem                  the writes to be visible
    the same, free      TMA to memory    warpgroup        wait_smem_to_gmem(0)         the copy to have left
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.grouped_matmul import gpu_quantized
from pallas_kernels.grouped_matmul.gpu_rows import ALIGNED, Tiles, tiles_of
from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.quant_matmul.gpu_tile import unsupported_weight
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, not_for_rounded_rows
from pallas_kernels.wgmma import Ref, piece, tiled

COLUMNS = 128  # outputs of a program, or twice as many
STEP = 128  # bytes of a row in a stage, the widest swizzle
STORED = 32  # outputs stored at once
BAND = 16  # most tiles of columns that are multiplied with all rows before the next ones


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


def unsupported_reason(x: jax.Array, weights: jax.Array | QuantizedWeight) -> str | None:
    """Why the kernel does not support these arguments, in one line; None if it does. Needs only shapes and dtypes."""
    if reason := unsupported_jax():
        return reason
    if isinstance(weights, QuantizedWeight):
        if x.dtype != jnp.int8:
            return unsupported_weight(x.dtype, weights)
        if reason := not_for_rounded_rows(weights):
            return reason
        weights = weights.data
    elif x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        return f"x is {x.dtype} and the weights {weights.dtype}; they must be bfloat16 or float16, and the same"
    _, num_outputs, num_inputs = weights.shape
    if num_inputs % _depth(x) or num_outputs % COLUMNS:
        return (
            f"weights of {num_outputs} outputs and {num_inputs} inputs; they must be multiples of "
            f"{COLUMNS} and {_depth(x)}"
        )
    return None


def grouped_matmul(
    x: Real[Array, "T E"],
    weights: Real[Array, "G F E"] | QuantizedWeight,
    group_sizes: Int[Array, " G"],
    *,
    row_scale: Float[Array, "T 1"] | None = None,
    sizes: TileSizes = DEFAULT,
    interpret: Any = None,
) -> Float[Array, "T F"]:
    """`reference.grouped_matmul`; sums in float32, or of integers in int32. Raises NotImplementedError with
    `unsupported_reason`'s reason.

    `interpret`: `plgpu.InterpretGPUParams` (jax >= 0.11.2), or None to compile.
    """
    if reason := unsupported_reason(x, weights):
        raise NotImplementedError(reason)
    if isinstance(weights, QuantizedWeight) and row_scale is None:
        return gpu_quantized.grouped_matmul(x, weights, group_sizes, interpret)
    num_rows, (num_groups, num_outputs, _) = x.shape[0], weights.shape
    tile, num_columns, num_stages = 128, COLUMNS, sizes.many_stages
    if num_rows <= sizes.few_rows * num_groups:
        num_columns = COLUMNS if num_outputs % sizes.few_columns else sizes.few_columns
        tile, num_stages = 64, sizes.few_stages
    padding = max(tile - num_rows, -num_rows % ALIGNED)
    x = jnp.pad(x, ((0, padding), (0, 0)))
    tiles = tiles_of(group_sizes, num_rows, tile)
    arrays = _Arrays(x, weights.data if isinstance(weights, QuantizedWeight) else weights, tiles)
    out = _call(arrays, (tile, num_columns), num_stages, interpret)
    row, ends = jnp.arange(num_rows, dtype=jnp.int32), jnp.cumsum(group_sizes, dtype=jnp.int32)
    out = out[:num_rows].astype(jnp.float32)
    if isinstance(weights, QuantizedWeight) and row_scale is not None:
        # In the pass over the sums that is made in any case. The scales of a model's experts stay in L2.
        group = jnp.searchsorted(ends, row, side="right", method="compare_all")
        out = out * row_scale * weights.scale.at[group].get(mode="clip")
    return jnp.where(row[:, None] < ends[-1], out, 0.0)  # rows without a group are not written


def _depth(x: jax.Array) -> int:
    """Inputs of a stage."""
    return STEP // x.dtype.itemsize


class _Arrays(NamedTuple):
    """What the kernel reads, or in the kernel refs to it."""

    x: Any  # [T, E]
    weights: Any  # [G, F, E], of the same dtype
    tiles: Tiles


class _Memory(NamedTuple):
    """A program's shared memory and barriers: their types, or in the kernel refs."""

    x: Any  # [stages, tile, STEP bytes]
    weights: Any  # [stages, columns, STEP bytes]
    out: Any  # [tile, STORED] sums, row-major
    ready: Any  # a barrier per stage


def _call(arrays: _Arrays, shape: tuple[int, int], num_stages: int, interpret: Any) -> jax.Array:
    """[T, F] sums; rows without a tile are uninitialized. shape: rows and outputs of a program."""
    x, (tile, num_columns) = arrays.x, shape
    depth, sums = _depth(x), jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    (num_rows, num_inputs), num_outputs = x.shape, arrays.weights.shape[1]
    num_steps = num_inputs // depth
    num_stages = min(num_stages, num_steps)
    num_tiles = num_outputs // num_columns
    band = max(n for n in range(1, BAND + 1) if num_tiles % n == 0)

    def body(refs: _Arrays, out_ref: Ref, memory: _Memory):
        index = lax.axis_index("tile")
        column = (lax.axis_index("band") * band + lax.axis_index("column")) * num_columns
        tiles = refs.tiles
        group, first, end = tiles.group[index], tiles.first[index], tiles.end[index]
        # A tile that would end after the last row begins earlier, with rows that are not its own.
        row = pl.multiple_of(jnp.minimum(tiles.begin[index], num_rows - tile), ALIGNED)
        columns = pl.ds(pl.multiple_of(column, num_columns), num_columns)

        def fetch(step, stage):
            inputs, ready = piece(step, depth), memory.ready.at[stage]
            rows = refs.x.at[pl.ds(row, tile), inputs]
            plgpu.copy_gmem_to_smem(rows, memory.x.at[stage], ready)
            of_group = refs.weights.at[group, columns, inputs]
            plgpu.copy_gmem_to_smem(of_group, memory.weights.at[stage], ready)

        def multiply(acc):
            def add(step, _):
                stage = lax.rem(step, jnp.int32(num_stages))
                plgpu.barrier_wait(memory.ready.at[stage])
                weights = memory.weights.at[stage].transpose((1, 0))
                plgpu.wgmma(acc, memory.x.at[stage], weights)
                plgpu.wgmma_wait(1)  # the previous one has read its stage
                before = step - 1

                @pl.when((step > 0) & (before + num_stages < num_steps))
                def _():
                    fetch(before + num_stages, lax.rem(before, jnp.int32(num_stages)))

            lax.fori_loop(0, num_steps, add, None)
            return acc[...]

        @pl.when(first < end)
        def _():
            for stage in range(num_stages):
                fetch(jnp.int32(stage), stage)
            acc = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, sums))
            for part in range(0, num_columns, STORED):
                memory.out[...] = acc[:, part : part + STORED]
                plgpu.commit_smem()
                at = pl.ds(pl.multiple_of(column + part, STORED), STORED)
                _store(memory.out, out_ref, (row, first, end), at)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_outputs), sums),
        # Programs run at about the same time if they have the same rows, or tiles of the same expert: the first reads
        # both from memory, the others from L2.
        grid=(num_outputs // (num_columns * band), arrays.tiles.group.shape[0], band),
        grid_names=("band", "tile", "column"),
        scratch_types=(
            _Memory(
                x=tiled(num_stages, tile, depth, dtype=x.dtype, swizzle=128),
                weights=tiled(num_stages, num_columns, depth, dtype=x.dtype, swizzle=128),
                out=plgpu.SMEM((tile, STORED), sums),
                ready=plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
            ),
        ),
        interpret=interpret,
        kernel_name="grouped_matmul",
    )
    return kernel(arrays)


def _store(smem, out_ref, rows, columns):
    """`rows`: where the tile begins, and which rows are its own, [first, end): a copy for each power of two in their
    number, the largest first.
    """
    row, first, end = rows
    at, num_rows, size = first - row, end - first, smem.shape[0]

    def store(at, size):
        out = out_ref.at[pl.ds(row + at, size), columns]
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(at, size)], out)

    while size:
        pl.when((num_rows & size) != 0)(partial(store, at, size))
        at, size = at + (num_rows & size), size // 2
    plgpu.wait_smem_to_gmem(0)
