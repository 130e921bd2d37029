"""Products with quantized weights for Hopper GPUs (sm_90a) in Mosaic GPU. Knows no engine, and makes no choices.

wgmma takes its left operand from registers, so that is the weight: a program computes the transposed result of ROWS
outputs and a tile of tokens, padded to a multiple of 8, not of 64. Bytes arrive by TMA, CHUNK bytes of each output at a
time, with several chunks in flight, and are converted in registers to integers that bfloat16 represents exactly, or to
fp8's values: weights are never rounded. int4's groups are separate products, whose float32 sums are multiplied by the
scale; other formats' scales are left to XLA, which fuses the multiplication into the consumer of the result.

Layers with few outputs have fewer tiles than the chip has SMs: their inputs are split, and the parts are added in
order. The number of parts, and so the order of all sums, depends only on the weight's shape: a row's result does not
depend on the number of rows.

With `interpret`, converted weights go through shared memory and products are added (`wgmma.py` says why). All else is
the same.

Letters: T tokens, E inputs, F outputs, J groups of int4, G = E / J.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.quant_matmul.quantized import MIDDLE, QuantizedWeight, padded, round_rows
from pallas_kernels.wgmma import added_product, as_operand, load, product, tiled

ROWS = 128  # outputs of a program
CHUNK = 128  # bytes of an output per stage
# Inputs are split until there are WANTED_PROGRAMS, the number of an H200's SMs. Sums are divided there, so these two
# are the same on every device and never tuned.
WANTED_PROGRAMS = 132
MOST_SPLITS = 8
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may depend on the kind of device (`tune.py`); no result depends on it.

    smem_kib: KiB of shared memory for a program's stages. With 100, two programs share an SM: one converts while the
    other multiplies. most_stages: most chunks in flight. enough_programs: with so many programs, each computes all
    splits of its outputs, in turn.
    """

    smem_kib: int = 100
    most_stages: int = 6
    enough_programs: int = 100


DEFAULT = TileSizes()


def unsupported_reason(
    dtype: jnp.dtype, weight: QuantizedWeight, *, round_x: bool = False
) -> str | None:
    """Why the kernel does not support this dtype of x, in one line; None if it does. Needs only shapes and dtypes."""
    if reason := unsupported_jax():
        return reason
    if dtype != jnp.bfloat16:
        return f"x is {dtype}; the kernel reads bfloat16"
    if round_x and weight.format != "int8":
        return f"x is rounded for int8 weights, and this one is {weight.format}"
    num_out, width = weight.data.shape
    if num_out % ROWS:
        return f"{num_out} outputs are no multiple of {ROWS}"
    if weight.format == "int4" and weight.group_size not in GROUP_SIZES:
        return f"groups have {weight.group_size} inputs, none of {GROUP_SIZES}"
    if width % CHUNK:
        return f"{weight.shape[1]} inputs of {weight.format} are no multiple of {CHUNK} bytes"
    return None


def quant_matmul(
    x: Float[Array, "T E"],
    weight: QuantizedWeight,
    *,
    round_x: bool = False,
    axis_name: str | None = None,
    sizes: TileSizes = DEFAULT,
    interpret: Any = None,
) -> Float[Array, "T F"]:
    """Same contract as `reference.quant_matmul`; x is bfloat16. Raises NotImplementedError with the reason.

    `axis_name`: the mesh axis whose devices have parts of the same rows of x.
    `interpret`: `plgpu.InterpretGPUParams` (jax >= 0.11.2), or None to compile.
    """
    if reason := unsupported_reason(x.dtype, weight, round_x=round_x):
        raise NotImplementedError(reason)
    num_tokens, x = x.shape[0], padded(x, weight)
    row_scale = None
    if round_x:
        x, row_scale = round_rows(x, axis_name)
    most = 64 if weight.format == "int4" else 128  # columns of float32 sums that fit in registers
    tile = next(n for n in (8, 16, 32, 64, 128) if n >= min(num_tokens, most))
    x = jnp.pad(x, ((0, -num_tokens % tile), (0, 0)))
    parts = _parts(x, weight, tile, sizes, interpret)[:, :num_tokens]
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    if weight.format == "int4":
        return out
    out = out.astype(jnp.float32)
    return (out if row_scale is None else out * row_scale) * weight.scale[None]


def _parts(
    x: jax.Array, weight: QuantizedWeight, tile: int, sizes: TileSizes, interpret: Any
) -> jax.Array:
    """x [T, E], T a multiple of `tile` -> float32 or, for integers, int32 [parts, T, F], to be added in order."""
    num_out, width = weight.data.shape
    num_chunks, group = width // CHUNK, weight.group_size
    num_splits = max(1, min(WANTED_PROGRAMS // (num_out // ROWS), MOST_SPLITS, num_chunks // 4))
    num_programs = num_out // ROWS * (x.shape[0] // tile)
    num_parts = num_splits if num_programs < sizes.enough_programs else 1
    is_int4, sum_dtype = weight.format == "int4", jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    inputs = 2 * CHUNK if is_int4 else CHUNK  # per chunk
    by_group = jax.tree.leaves((weight.scale, weight.zero)) if is_int4 else []
    num_groups = inputs // group if is_int4 else 0  # per chunk
    group_bytes = num_groups * ROWS * sum(each.dtype.itemsize for each in by_group)
    stage_bytes = ROWS * CHUNK + tile * inputs * x.dtype.itemsize + group_bytes
    num_stages = max(1, min(sizes.most_stages, sizes.smem_kib * 1024 // stage_bytes))
    data = lax.bitcast_convert_type(weight.data, jnp.int8) if is_int4 else weight.data

    def body(x_ref, data_ref, *rest):
        group_refs, rest = rest[: len(by_group)], rest[len(by_group) :]
        out_ref, x_smem, data_smem, group_smem, wide_smem, ready = rest
        rows = pl.ds(pl.multiple_of(lax.axis_index("rows") * ROWS, ROWS), ROWS)
        tokens = pl.ds(pl.multiple_of(lax.axis_index("tile") * tile, tile), tile)

        def fetch(chunk, stage):
            def of(size):
                return pl.ds(pl.multiple_of(chunk * size, size), size)

            copies = [
                (x_ref.at[tokens, of(inputs)], x_smem),
                (data_ref.at[rows, of(CHUNK)], data_smem),
            ]
            copies += [
                (ref.at[of(num_groups), rows], smem)
                for ref, smem in zip(group_refs, group_smem, strict=True)
            ]
            for source, smem in copies:
                plgpu.copy_gmem_to_smem(source, smem.at[stage], ready.at[stage])

        def step(i, acc, first, num_steps):
            stage = lax.rem(i, jnp.int32(num_stages))
            plgpu.barrier_wait(ready.at[stage])
            x_stage, data_stage = x_smem.at[stage], data_smem.at[stage]
            if x.dtype == jnp.int8:
                acc = added_product(acc, data_stage, x_stage.transpose((1, 0)), interpret=interpret)
            elif is_int4:
                stages = [smem.at[stage] for smem in group_smem]
                acc = _add_groups(acc, x_stage, data_stage, stages, group, wide_smem)
            else:
                wide = _as_operand(_widen(data_stage), wide_smem)
                acc = added_product(acc, wide, x_stage.transpose((1, 0)), interpret=interpret)
            plgpu.commit_smem()  # all threads have read the stage
            pl.when(i + num_stages < num_steps)(lambda: fetch(first + i + num_stages, stage))
            return acc

        def sum_of(split):
            first = lax.div(split * num_chunks, jnp.int32(num_splits))
            num_steps = lax.div((split + 1) * num_chunks, jnp.int32(num_splits)) - first
            for stage in range(num_stages):
                pl.when(stage < num_steps)(partial(fetch, first + stage, stage))
            zeros = plgpu.layout_cast(jnp.zeros((ROWS, tile), sum_dtype), plgpu.Layout.WGMMA)
            add = partial(step, first=first, num_steps=num_steps)
            # In the transposed layout a thread's pairs of values are along outputs, as in memory.
            transposed = plgpu.Layout.WGMMA_TRANSPOSED
            return plgpu.layout_cast(lax.fori_loop(0, num_steps, add, zeros), transposed)

        def to_memory(split):
            return out_ref.at[split, tokens, rows].transpose((1, 0))

        if num_parts == num_splits:
            split = lax.axis_index("split")
            to_memory(split)[...] = sum_of(split)
            return

        def add_next(split, _):
            part, out = sum_of(split), to_memory(0)

            @pl.when(split == 0)
            def _():
                out[...] = part

            @pl.when(split > 0)
            def _():  # a thread reads only what it wrote
                out[...] = load(out, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False) + part

        lax.fori_loop(0, num_splits, add_next, None)

    # A tile of shared memory may have at most one group.
    small = group if is_int4 else CHUNK
    x_tiled = partial(tiled, swizzle=min(128, small * x.dtype.itemsize))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_parts, x.shape[0], num_out), sum_dtype),
        grid=(num_parts, num_out // ROWS, x.shape[0] // tile),
        grid_names=("split", "rows", "tile"),
        scratch_types=(
            x_tiled(num_stages, tile, inputs, dtype=x.dtype),
            tiled(num_stages, ROWS, CHUNK, dtype=data.dtype, swizzle=small),
            [plgpu.SMEM((num_stages, num_groups, ROWS), each.dtype) for each in by_group],
            None if interpret is None else x_tiled(ROWS, CHUNK, dtype=jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2 + len(by_group), num_barriers=num_stages),
        ),
        interpret=interpret,
    )
    with jax.named_scope("quant_matmul"):  # for whoever reads the compiled program
        return kernel(x, data, *by_group)


def _as_operand(a, wide_smem):
    """`wgmma.as_operand` in the first columns of a buffer of the maximum width."""
    return as_operand(a, None if wide_smem is None else wide_smem.at[:, pl.ds(0, a.shape[1])])


def _widen(data_smem):
    """int8 or fp8 [F, E] -> the same values in bfloat16, in wgmma's layout for the left operand."""
    data = load(data_smem, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if data.dtype == jnp.int8:
        return plgpu.layout_cast(data.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
    # One instruction for two values.
    half = plgpu.layout_cast(data.astype(jnp.float16), plgpu.Layout.WGMMA)
    return half.astype(jnp.float32).astype(jnp.bfloat16)


def _add_groups(acc, x_smem, data_smem, group_smem, group: int, wide_smem):
    """acc + the products of a chunk of int4: 128 bytes, or 256 inputs, of each output."""
    by_out = plgpu.Layout.WGMMA.reduce(1)
    scale_smem, *zero_smem = group_smem

    def add_pair(pair, acc):
        def part_of(index, size):
            return pl.ds(pl.multiple_of(index * size, size), size)

        data = load(data_smem.at[:, part_of(pair, group)], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        # Signed bytes convert to bfloat16 fast, and four of them are one register: q, and 16 (q - 8) without a shift.
        low, high = data & jnp.int8(15), (data & jnp.int8(-16)) ^ jnp.int8(-128)
        for half, (q, middle, unit) in enumerate(((low, 0, 1), (high, MIDDLE, 16))):
            number = 2 * pair + half
            w = plgpu.layout_cast(q.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
            if zero_smem:
                zero = load(zero_smem[0].at[number], layout=by_out, optimized=False)
                zero = (zero.astype(jnp.float32) - middle) * unit
                w = w - lax.broadcast_in_dim(zero.astype(jnp.bfloat16), w.shape, [0])
            elif middle != MIDDLE:
                w = w - jnp.bfloat16(MIDDLE)
            x = x_smem.at[:, part_of(number, group)].transpose((1, 0))
            part = product(_as_operand(w, wide_smem), x)
            scale = load(scale_smem.at[number], layout=by_out, optimized=False) * (1 / unit)
            acc = acc + part * lax.broadcast_in_dim(scale, part.shape, [0])
        return acc

    return lax.fori_loop(0, CHUNK // group, add_pair, acc)
