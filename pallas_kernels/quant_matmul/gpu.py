"""Products with quantized weights for Hopper GPUs (sm_90a) in Mosaic GPU. Knows no engine, and makes no choices.

wgmma takes its left operand from registers, so that is the weight: a program computes the transposed result.

**Tile.** A program is one warpgroup, with ROWS outputs, wgmma's rows, and a tile of tokens, padded to a multiple of 8,
not of 64. Weights are converted in registers to integers that bfloat16 represents exactly, or to fp8's values: they are
never rounded. Groups are separate products, whose float32 sums are multiplied by the scale; a scale per output
multiplies the sum of all inputs, before bias and cast. A result in bfloat16 is half the bytes of the sums.

**Splits.** Layers with few outputs have fewer tiles than the chip has SMs: their inputs are split. XLA adds the parts
in order, then scales, adds the bias and casts. The number of parts, and so the order of all sums, depends only on the
weight's shape: a row's result does not depend on the number of rows.

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
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.matmul.reference import with_bias
from pallas_kernels.quant_matmul.quantized import (
    MIDDLE,
    QuantizedWeight,
    not_for_rounded_rows,
    padded,
    round_rows,
)
from pallas_kernels.wgmma import (
    Ref,
    added_product,
    as_operand,
    filled,
    load,
    num_splits,
    piece,
    product,
    swizzle_of,
    tiled,
)

ROWS = 128  # outputs of a program
CHUNK = 128  # bytes of an output per stage
GROUP_SIZES = (32, 64, 128)  # of int4; of int8 and fp8 CHUNK


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
    if round_x and (reason := not_for_rounded_rows(weight)):
        return reason
    num_out, width = weight.data.shape
    if num_out % ROWS:
        return f"{num_out} outputs are no multiple of {ROWS}"
    sizes = GROUP_SIZES if weight.format == "int4" else (CHUNK,)
    if weight.has_groups and weight.group_size not in sizes:
        return f"groups have {weight.group_size} inputs, none of {sizes}"
    if width % CHUNK:
        return f"{weight.shape[1]} inputs of {weight.format} are no multiple of {CHUNK} bytes"
    return None


def quant_matmul(
    x: Float[Array, "T E"],
    weight: QuantizedWeight,
    *,
    round_x: bool = False,
    bias: Float[Array, " F"] | None = None,
    dtype: DTypeLike = jnp.float32,
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
    # Columns of float32 sums that fit in registers; with groups there are sums of a group, too.
    most = 64 if weight.has_groups else 128
    tile = next(n for n in (8, 16, 32, 64, 128) if n >= min(num_tokens, most))
    fill = ((0, -num_tokens % tile), (0, 0))
    x = jnp.pad(x, fill)
    last = _Last(
        row_scale=None if row_scale is None else jnp.pad(row_scale, fill)[:, 0],
        scale=None if weight.has_groups else weight.scale,
        bias=bias,
    )
    parts = _parts(x, weight, last, jnp.dtype(dtype), tile, sizes, interpret)[:, :num_tokens]
    if _num_splits(weight) == 1:
        return parts[0]
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    out = out.astype(jnp.float32)
    if row_scale is not None:
        out = out * row_scale
    if last.scale is not None:
        out = out * last.scale[None]
    return with_bias(out, bias, dtype)


def _num_splits(weight: QuantizedWeight) -> int:
    num_out, width = weight.data.shape
    return num_splits(num_out // ROWS, width // CHUNK)


class _Operands(NamedTuple):
    """Arrays, or in a kernel refs; and likewise their stages in shared memory, each with an axis of stages before."""

    x: Any  # [T, E], a stage [tile, inputs of a chunk]: bfloat16, or int8 if rounded
    data: Any  # [F, bytes of E], a stage [ROWS, CHUNK]: int8 or fp8; int4 as pairs in int8
    scale: Any = None  # float32[J, F], a stage [groups of a chunk, ROWS]: only with groups
    zero: Any = None  # uint8, likewise: of int4, or None

    def present(self) -> list[Any]:
        return [each for each in self if each is not None]

    def stage(self, i) -> _Operands:
        return _Operands(*(None if ref is None else ref.at[i] for ref in self))


class _Last(NamedTuple):
    """What is done with the sum of all inputs before the cast, in this order. Arrays, or in a kernel refs, or None."""

    row_scale: Any  # float32[T]: only of rounded x
    scale: Any  # float32[F]: without groups
    bias: Any  # [F]


class _Memory(NamedTuple):
    """A program's shared memory and barriers: their types, or in the kernel refs."""

    stages: _Operands
    wide: Any  # bfloat16[ROWS, CHUNK], only for the interpreter: see `as_operand`
    ready: Any  # a barrier per stage


def _parts(
    x: jax.Array,
    weight: QuantizedWeight,
    last: _Last,
    dtype: jnp.dtype,
    tile: int,
    sizes: TileSizes,
    interpret: Any,
) -> jax.Array:
    """x [T, E], T a multiple of `tile` -> [1, T, F], the result; or if inputs are split float32 or, for integers, int32
    [parts, T, F], to be added in order.
    """
    num_out, width = weight.data.shape
    num_chunks, group = width // CHUNK, weight.group_size
    splits = _num_splits(weight)
    num_programs = num_out // ROWS * (x.shape[0] // tile)
    num_parts = splits if num_programs < sizes.enough_programs else 1
    is_int4, sum_dtype = weight.format == "int4", jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    arrays = _Operands(x, weight.data)
    inputs, num_groups = CHUNK, 0  # per chunk
    if is_int4:
        data = lax.bitcast_convert_type(weight.data, jnp.int8)
        arrays = _Operands(x, data, weight.scale, weight.zero)
        inputs, num_groups = 2 * CHUNK, 2 * CHUNK // group
    elif weight.has_groups:
        arrays, num_groups = _Operands(x, weight.data, weight.scale), 1
    by_group = arrays.present()[2:]
    group_bytes = num_groups * ROWS * sum(each.dtype.itemsize for each in by_group)
    stage_bytes = ROWS * CHUNK + tile * inputs * x.dtype.itemsize + group_bytes
    num_stages = max(1, min(sizes.most_stages, sizes.smem_kib * 1024 // stage_bytes))

    def body(refs: _Operands, last_refs: _Last, out_ref: Ref, memory: _Memory):
        rows = piece(lax.axis_index("rows"), ROWS)
        tokens = piece(lax.axis_index("tile"), tile)
        multiply = _multiplication(weight, x.dtype, memory.wide, interpret)

        def fetch(chunk, stage):
            places = [(tokens, piece(chunk, inputs)), (rows, piece(chunk, CHUNK))]
            places += [(piece(chunk, num_groups), rows) for _ in by_group]
            into = memory.stages.stage(stage)
            for ref, place, smem in zip(refs.present(), places, into.present(), strict=True):
                plgpu.copy_gmem_to_smem(ref.at[place], smem, memory.ready.at[stage])

        def add_chunk(i, acc, first, num_steps):
            stage = lax.rem(i, jnp.int32(num_stages))
            plgpu.barrier_wait(memory.ready.at[stage])
            acc = multiply(acc, memory.stages.stage(stage))
            plgpu.commit_smem()  # all threads have read the stage
            pl.when(i + num_stages < num_steps)(lambda: fetch(first + i + num_stages, stage))
            return acc

        def sum_of(split):
            first = lax.div(split * num_chunks, jnp.int32(splits))
            num_steps = lax.div((split + 1) * num_chunks, jnp.int32(splits)) - first
            for stage in range(num_stages):
                pl.when(stage < num_steps)(partial(fetch, first + stage, stage))
            zeros = filled((ROWS, tile), 0, plgpu.Layout.WGMMA, sum_dtype)
            add = partial(add_chunk, first=first, num_steps=num_steps)
            out = lax.fori_loop(0, num_steps, add, zeros)
            if splits == 1:
                out = _finished(out, last_refs, rows, tokens).astype(dtype)
            # In the transposed layout a thread's pairs of values are along outputs, as in memory.
            return plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)

        def to_memory(split):
            return out_ref.at[split, tokens, rows].transpose((1, 0))

        if num_parts == splits:
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

        lax.fori_loop(0, splits, add_next, None)

    # A tile of shared memory may have at most one group.
    small = group if is_int4 else CHUNK
    x_tiled = partial(tiled, dtype=x.dtype, swizzle=swizzle_of(small * x.dtype.itemsize))
    stages = _Operands(
        x_tiled(num_stages, tile, inputs),
        tiled(num_stages, ROWS, CHUNK, dtype=arrays.data.dtype, swizzle=small),
        *(plgpu.SMEM((num_stages, num_groups, ROWS), each.dtype) for each in by_group),
    )
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (num_parts, x.shape[0], num_out), dtype if splits == 1 else sum_dtype
        ),
        grid=(num_parts, num_out // ROWS, x.shape[0] // tile),
        grid_names=("split", "rows", "tile"),
        scratch_types=(
            _Memory(
                stages=stages,
                wide=None if interpret is None else x_tiled(ROWS, CHUNK, dtype=jnp.bfloat16),
                ready=plgpu.Barrier(num_arrivals=2 + len(by_group), num_barriers=num_stages),
            ),
        ),
        interpret=interpret,
        kernel_name="quant_matmul",
    )
    with jax.named_scope("quant_matmul"):  # for whoever reads the compiled program
        return kernel(arrays, last)


def _finished(sums, last: _Last, rows, tokens):
    """float32 of sums [ROWS, tile of T], with what is done before the cast."""

    def along(ref, place, axis: int):
        """Spread over the other axis."""
        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
        values = load(ref.at[place], layout=layout, optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(values, sums.shape, [axis])

    out = sums.astype(jnp.float32)
    if last.row_scale is not None:
        out = out * along(last.row_scale, tokens, 1)
    if last.scale is not None:
        out = out * along(last.scale, rows, 0)
    if last.bias is not None:
        out = out + along(last.bias, rows, 0)
    return out


def _multiplication(
    weight: QuantizedWeight, x_dtype: jnp.dtype, wide_smem: Ref | None, interpret: Any
) -> Callable[[Any, _Operands], Any]:
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


def _add_group(acc, stage: _Operands, *, operand: Callable[[jax.Array], Any]):
    """acc + the product of a chunk of int8 or fp8 that is a group."""
    part = product(operand(_widen(stage.data)), stage.x.transpose((1, 0)))
    scale = load(stage.scale.at[0], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return acc + part * lax.broadcast_in_dim(scale, part.shape, [0])


def _add_int4(acc, stage: _Operands, *, operand: Callable[[jax.Array], Any], group: int):
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
