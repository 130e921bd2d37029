"""A tile of outputs times a tile of rows, in the kernels for Hopper GPUs of this operation and of grouped_matmul.

wgmma takes its left operand from registers, so that is the weight: a program computes the transposed result.

**Tile.** A program is one warpgroup, with ROWS outputs, wgmma's rows, and a tile of tokens, padded to a multiple of 8,
not of 64. Weights are converted in registers to integers that bfloat16 represents exactly, or to fp8's values: they are
never rounded. Groups are separate products, whose float32 sums are multiplied by the scale.

**Stages.** Step i multiplies a chunk: CHUNK bytes of each output and x's values for them, which lie in stage i % S of S
stages of shared memory, with the groups' scales and zeros.

**Protocol.** The warpgroup starts all copies itself: those for step i at the end of step i - S, the first S before the
loop.

    buffer             producer         consumer              barrier                       waits for
    stages [i % S]     TMA for step i   warpgroup and wgmma,  ready[i % S], an arrival of   all copies to arrive
                                        step i                each array (2 to 4)
    the same, free     step i           TMA for step i + S    commit_smem, end of step i    all threads to have read
    sums in registers  wgmma of step i  step i + 1, store     implied by reading them       wgmma to be done

Letters: T tokens, E inputs, F outputs, J groups, G = E / J.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quant_matmul.quantized import MIDDLE, QuantizedWeight, not_for_rounded_rows
from pallas_kernels.wgmma import (
    Ref,
    added_product,
    as_operand,
    filled,
    load,
    piece,
    product,
    swizzle_of,
    tiled,
)

ROWS = 128  # outputs of a program
CHUNK = 128  # bytes of an output per stage
GROUP_SIZES = (32, 64, 128)  # of int4; of int8 and fp8 CHUNK


def unsupported_weight(
    dtype: jnp.dtype, weight: QuantizedWeight, *, round_x: bool = False
) -> str | None:
    """Why `sum_of_chunks` does not support this dtype of x with such a weight, in one line; None if it does."""
    if dtype != jnp.bfloat16:
        return f"x is {dtype}; the kernel reads bfloat16"
    if round_x and (reason := not_for_rounded_rows(weight)):
        return reason
    *_, num_out, width = weight.data.shape
    if num_out % ROWS:
        return f"{num_out} outputs are no multiple of {ROWS}"
    sizes = GROUP_SIZES if weight.format == "int4" else (CHUNK,)
    if weight.has_groups and weight.group_size not in sizes:
        return f"groups have {weight.group_size} inputs, none of {sizes}"
    if width % CHUNK:
        return f"{weight.shape[-1]} inputs of {weight.format} are no multiple of {CHUNK} bytes"
    return None


class Operands(NamedTuple):
    """Arrays, or in a kernel refs, those of weights perhaps with an axis of experts before; and likewise their stages
    in shared memory, each with an axis of stages before.
    """

    x: Any  # [T, E], a stage [tile, inputs of a chunk]: bfloat16, or int8 if rounded
    data: Any  # [F, bytes of E], a stage [ROWS, CHUNK]: int8 or fp8; int4 as pairs in int8
    scale: Any = None  # float32[J, F], a stage [groups of a chunk, ROWS]: only with groups
    zero: Any = None  # uint8, likewise: of int4, or None

    def present(self) -> list[Any]:
        return [each for each in self if each is not None]

    def stage(self, i) -> Operands:
        return Operands(*(None if ref is None else ref.at[i] for ref in self))


def operands_of(x: jax.Array, weight: QuantizedWeight) -> Operands:
    """The arrays that a kernel reads."""
    if weight.format == "int4":
        data = lax.bitcast_convert_type(weight.data, jnp.int8)
        return Operands(x, data, weight.scale, weight.zero)
    return Operands(x, weight.data, weight.scale if weight.has_groups else None)


class Memory(NamedTuple):
    """A program's shared memory and barriers: their types, or in the kernel refs."""

    stages: Operands
    wide: Any  # bfloat16[ROWS, CHUNK], only for the interpreter: see `as_operand`
    ready: Any  # a barrier per stage


def memory_of(
    operands: Operands,
    weight: QuantizedWeight,
    tile: int,
    *,
    smem_kib: int,
    most_stages: int,
    interpret: Any,
) -> Memory:
    """For a tile of so many tokens: at most `most_stages` stages, in `smem_kib` KiB."""
    is_int4, x_dtype = weight.format == "int4", operands.x.dtype
    inputs = CHUNK * (2 if is_int4 else 1)
    num_groups = inputs // weight.group_size if weight.has_groups else 0  # per chunk
    by_group = operands.present()[2:]
    group_bytes = num_groups * ROWS * sum(each.dtype.itemsize for each in by_group)
    stage_bytes = ROWS * CHUNK + tile * inputs * x_dtype.itemsize + group_bytes
    num_stages = max(1, min(most_stages, smem_kib * 1024 // stage_bytes))
    # A tile of shared memory may have at most one group.
    small = weight.group_size if is_int4 else CHUNK
    x_tiled = partial(tiled, dtype=x_dtype, swizzle=swizzle_of(small * x_dtype.itemsize))
    return Memory(
        stages=Operands(
            x_tiled(num_stages, tile, inputs),
            tiled(num_stages, ROWS, CHUNK, dtype=operands.data.dtype, swizzle=small),
            *(plgpu.SMEM((num_stages, num_groups, ROWS), each.dtype) for each in by_group),
        ),
        wide=None if interpret is None else x_tiled(ROWS, CHUNK, dtype=jnp.bfloat16),
        ready=plgpu.Barrier(num_arrivals=2 + len(by_group), num_barriers=num_stages),
    )


def sum_of_chunks(
    refs: Operands,
    memory: Memory,
    multiply: Callable[[Any, Operands], Any],
    *,
    chunks: tuple[Any, Any],
    tokens: Any,
    rows: Any,
    expert: tuple[Any, ...] = (),
):
    """[ROWS, tile of T] of the outputs `rows` and the slice `tokens` of x: float32, or int32 of integers.

    multiply: of `multiplication`. chunks: the first, and how many. expert: the index in weights of experts.
    """
    stages, (first, num_steps) = memory.stages, chunks
    num_stages, tile, inputs = stages.x.shape

    def fetch(chunk, stage):
        places = [(tokens, piece(chunk, inputs)), (*expert, rows, piece(chunk, CHUNK))]
        by_group = stages.present()[2:]
        places += [(*expert, piece(chunk, each.shape[1]), rows) for each in by_group]
        into = stages.stage(stage)
        for ref, place, smem in zip(refs.present(), places, into.present(), strict=True):
            plgpu.copy_gmem_to_smem(ref.at[place], smem, memory.ready.at[stage])

    def add_chunk(i, acc):
        stage = lax.rem(i, jnp.int32(num_stages))
        plgpu.barrier_wait(memory.ready.at[stage])
        acc = multiply(acc, stages.stage(stage))
        plgpu.commit_smem()  # all threads have read the stage
        pl.when(i + num_stages < num_steps)(lambda: fetch(first + i + num_stages, stage))
        return acc

    for stage in range(num_stages):
        pl.when(stage < num_steps)(partial(fetch, first + stage, stage))
    dtype = jnp.int32 if refs.x.dtype == jnp.int8 else jnp.float32
    zeros = filled((ROWS, tile), 0, plgpu.Layout.WGMMA, dtype)
    return lax.fori_loop(0, num_steps, add_chunk, zeros)


def along(ref: Ref, shape: tuple[int, ...], axis: int):
    """float32 values in memory along an axis of the sums, repeated over the other."""
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    values = load(ref, layout=layout, optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(values, shape, [axis])


def multiplication(
    weight: QuantizedWeight, x_dtype: jnp.dtype, wide_smem: Ref | None, interpret: Any
) -> Callable[[Any, Operands], Any]:
    """acc, a stage -> acc + the product of the stage; chosen before the loop, for the weight and the interpreter."""
    operand = partial(as_operand, smem=wide_smem)
    add = partial(added_product, interpret=interpret)
    if weight.format == "int4":
        return partial(_add_int4, operand=operand, group=weight.group_size)
    if weight.has_groups:
        return partial(_add_group, operand=operand)
    if x_dtype == jnp.int8:
        return lambda acc, stage: add(acc, stage.data, stage.x.transpose((1, 0)))
    return lambda acc, stage: add(acc, operand(_widen(stage.data)), stage.x.transpose((1, 0)))


def _widen(data_smem):
    """int8 or fp8 [F, E] -> the same values in bfloat16, in wgmma's layout for the left operand."""
    data = load(data_smem, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if data.dtype == jnp.int8:
        return plgpu.layout_cast(data.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
    # One instruction for two values.
    half = plgpu.layout_cast(data.astype(jnp.float16), plgpu.Layout.WGMMA)
    return half.astype(jnp.float32).astype(jnp.bfloat16)


def _add_group(acc, stage: Operands, *, operand: Callable[[jax.Array], Any]):
    """acc + the product of a chunk of int8 or fp8 that is a group."""
    part = product(operand(_widen(stage.data)), stage.x.transpose((1, 0)))
    scale = load(stage.scale.at[0], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return acc + part * lax.broadcast_in_dim(scale, part.shape, [0])


def _add_int4(acc, stage: Operands, *, operand: Callable[[jax.Array], Any], group: int):
    """acc + the products of a chunk of int4: 128 bytes, or 256 inputs, of each output."""
    by_out = plgpu.Layout.WGMMA.reduce(1)

    def add_pair(pair, acc):
        data = load(stage.data.at[:, piece(pair, group)], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        # Signed bytes convert to bfloat16 fast, and four of them are one register: q, and 16 (q - 8) without a shift.
        low, high = data & jnp.int8(15), (data & jnp.int8(-16)) ^ jnp.int8(-128)
        for half, (q, middle, unit) in enumerate(((low, 0, 1), (high, MIDDLE, 16))):
            number = 2 * pair + half
            w = plgpu.layout_cast(q.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
            if stage.zero is not None:
                zero = load(stage.zero.at[number], layout=by_out, optimized=False)
                zero = (zero.astype(jnp.float32) - middle) * unit
                w = w - lax.broadcast_in_dim(zero.astype(jnp.bfloat16), w.shape, [0])
            elif middle != MIDDLE:
                w = w - jnp.bfloat16(MIDDLE)
            x = stage.x.at[:, piece(number, group)].transpose((1, 0))
            part = product(operand(w), x)
            scale = load(stage.scale.at[number], layout=by_out, optimized=False) * (1 / unit)
            acc = acc + part * lax.broadcast_in_dim(scale, part.shape, [0])
        return acc

    return lax.fori_loop(0, CHUNK // group, add_pair, acc)
