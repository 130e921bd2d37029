"""Products with quantized weights for Hopper GPUs (sm_90a) in Mosaic GPU. Knows no engine, and makes no choices.

`gpu_tile.py` multiplies tiles; a scale per output multiplies the sum of all inputs, before bias and cast. A result in
bfloat16 is half the bytes of the sums.

**Splits.** Layers with few outputs have fewer tiles than the chip has SMs: their inputs are split. XLA adds the parts
in order, then scales, adds the bias and casts. The number of parts, and so the order of all sums, depends only on the
weight's shape: a row's result does not depend on the number of rows.

Letters: T tokens, E inputs, F outputs, J groups, G = E / J.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    unsupported_weight,
)
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, padded, round_rows
from pallas_kernels.wgmma import Ref, load, num_splits, piece


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
    return unsupported_weight(dtype, weight, round_x=round_x)


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


class _Last(NamedTuple):
    """What is done with the sum of all inputs before the cast, in this order. Arrays, or in a kernel refs, or None."""

    row_scale: Any  # float32[T]: only of rounded x
    scale: Any  # float32[F]: without groups
    bias: Any  # [F]


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
    num_chunks, splits = width // CHUNK, _num_splits(weight)
    num_programs = num_out // ROWS * (x.shape[0] // tile)
    num_parts = splits if num_programs < sizes.enough_programs else 1
    operands, sum_dtype = operands_of(x, weight), jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    options = {"smem_kib": sizes.smem_kib, "most_stages": sizes.most_stages}

    def body(refs: Operands, last_refs: _Last, out_ref: Ref, memory: Memory):
        rows = piece(lax.axis_index("rows"), ROWS)
        tokens = piece(lax.axis_index("tile"), tile)
        multiply = multiplication(weight, x.dtype, memory.wide, interpret)

        def sum_of(split):
            first = lax.div(split * num_chunks, jnp.int32(splits))
            num_steps = lax.div((split + 1) * num_chunks, jnp.int32(splits)) - first
            place = {"chunks": (first, num_steps), "tokens": tokens, "rows": rows}
            out = sum_of_chunks(refs, memory, multiply, **place)
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

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (num_parts, x.shape[0], num_out), dtype if splits == 1 else sum_dtype
        ),
        grid=(num_parts, num_out // ROWS, x.shape[0] // tile),
        grid_names=("split", "rows", "tile"),
        scratch_types=(memory_of(operands, weight, tile, **options, interpret=interpret),),
        interpret=interpret,
        kernel_name="quant_matmul",
    )
    with jax.named_scope("quant_matmul"):  # for whoever reads the compiled program
        return kernel(operands, last)


def _finished(sums, last: _Last, rows, tokens):
    """float32 of sums [ROWS, tile of T], with what is done before the cast."""

    out = sums.astype(jnp.float32)
    if last.row_scale is not None:
        out = out * along(last.row_scale.at[tokens], sums.shape, 1)
    if last.scale is not None:
        out = out * along(last.scale.at[rows], sums.shape, 0)
    if last.bias is not None:
        out = out + along(last.bias.at[rows], sums.shape, 0)
    return out
