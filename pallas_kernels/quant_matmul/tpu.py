"""Products with quantized weights on TPUs (Mosaic): the weight is read from HBM in 8 or 4 bits and converted in VMEM.

A grid of (tile of tokens, tile of outputs). A tile of tokens stays in VMEM while the weight streams through, two tiles
of outputs at a time, each with all its inputs: tiles of tokens are large, since the weight is read once for each.

Weights are converted to integers that bfloat16 represents exactly, or to fp8's values, so they are not rounded, and
scales multiply float32 sums: of an output, or of a group, which for int4 is minus its zero times the sum of the group's
x. With more than LANES tokens, scaling the sums of groups takes more operations than scaling their weights, and sums
of so few inputs leave half of an MXU idle: weights with groups are then scaled in float32 and rounded to bfloat16,
once. For int4 the kernel uses q - 8 and zero - 8, so a weight without zeros needs no subtraction. Bias and cast come
last, in the kernel: a result in bfloat16 is half the bytes of the sums.

The sum of an output is over chunks or groups of inputs in an order that depends only on the weight's shape: among up
to LANES rows, and among more, a row's result does not depend on their number, as long as the MXU's does not.

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
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.mosaic_tpu import LANES, dot_transposed, in_chunks
from pallas_kernels.quant_matmul.quantized import (
    MIDDLE,
    QuantizedWeight,
    not_for_rounded_rows,
    padded,
    round_rows,
)

X_BYTES = 28 << 20  # of tiles of x in VMEM, at most
# Per weight tile, at most. Two of both and of the result, and sums: at most 48 MB.
TILE_BYTES = 7 << 20
CHUNK = 4096  # inputs multiplied at once. Sums are divided there, so it is never tuned
# Of at least 64 MB: those 48, and scales and zeros of groups. With one buffer of x, tiles of results are larger, and
# scaled weights and spilled registers need room.
VMEM_BYTES, VMEM_BYTES_OF_ONE = 52 << 20, 56 << 20
GROUP_SIZES = (32, 64, 128)  # of int4
# Inputs of weights with groups in an iteration. The MXU can begin one group before it has the results of another; with
# many tokens it sums that many. More would gain little, and large programs compile slowly.
INPUTS_AT_ONCE = 2048
UNIT = 16  # the kernel has UNIT * (q - 8), in the upper half of a byte


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may depend on the kind of device (`tune.py`); no result depends on it.

    tile_tokens, tile_out: most tokens and outputs per tile, LANES times a power of two; halved until they fit.
    least_tiles: of outputs, with fewer tokens than LANES.
    """

    tile_tokens: int = 1024
    tile_out: int = 512
    least_tiles: int = 8


DEFAULT = TileSizes()


def unsupported_reason(
    dtype: jnp.dtype, weight: QuantizedWeight, *, round_x: bool = False
) -> str | None:
    """Why the kernel does not support this dtype of x, in one line; None if it does. Needs only shapes and dtypes."""
    if dtype != jnp.bfloat16:
        return f"x is {dtype}; the kernel reads bfloat16"
    if round_x and (reason := not_for_rounded_rows(weight)):
        return reason
    num_in = weight.shape[1]
    if weight.format == "int4":
        if weight.group_size not in GROUP_SIZES:
            return f"groups have {weight.group_size} inputs, none of {GROUP_SIZES}"
        if num_in % (2 * LANES):
            return f"{num_in} inputs are no multiple of {2 * LANES}, in two halves of bytes"
    elif num_in % LANES:
        return f"{num_in} inputs are no multiple of {LANES}"
    elif weight.has_groups and (weight.group_size % LANES or weight.group_size > CHUNK):
        return f"groups have {weight.group_size} inputs, no multiple of {LANES} up to {CHUNK}"
    if LANES * weight.data.shape[1] > TILE_BYTES or LANES * num_in * 2 * 2 > X_BYTES:
        return f"{num_in} inputs of a tile do not fit into VMEM"
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
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "T F"]:
    """Same contract as `reference.quant_matmul`; x is bfloat16. Raises NotImplementedError with the reason.

    `axis_name`: the mesh axis whose devices have parts of the same rows of x.
    """
    if reason := unsupported_reason(x.dtype, weight, round_x=round_x):
        raise NotImplementedError(reason)
    num_tokens, x = x.shape[0], padded(x, weight)
    row_scale = None
    if round_x:
        x, row_scale = round_rows(x, axis_name)
    fill = ((0, max(0, _sublanes(x) - num_tokens)), (0, 0))  # one register
    x = jnp.pad(x, fill)
    arrays = _Arrays(
        x=x,
        data=weight.data,
        scale=weight.scale.reshape(-1, weight.shape[0]),
        row_scale=None if row_scale is None else jnp.pad(row_scale, fill),
        zero=weight.zero,
        bias=None if bias is None else bias[None],
    )
    tiles = tiles_of(x, weight, sizes)
    x_buffers = _x_buffers(x, weight, sizes)
    return _call(arrays, weight, tiles, x_buffers, jnp.dtype(dtype), interpret)[:num_tokens]


def tiles_of(x: jax.Array, weight: QuantizedWeight, sizes: TileSizes) -> tuple[int, int]:
    """Tokens and outputs of a tile. x as the kernel reads it: padded, and rounded if it is to be.

    Tiles of tokens are about equally large, so few rows are multiplied in vain. Of outputs there are many if the MXU is
    the bound. With few tokens the weight's bytes are the bound, and the first tile's load overlaps with nothing: then
    there should be several tiles.
    """
    (num_tokens, num_in), (num_out, width) = x.shape, weight.data.shape
    row_bytes = num_in * x.dtype.itemsize * _x_buffers(x, weight, sizes)
    num_tiles = pl.cdiv(num_tokens, _halved(sizes.tile_tokens, X_BYTES // row_bytes))
    sublanes = _sublanes(x)
    tile_tokens = pl.cdiv(pl.cdiv(num_tokens, num_tiles), sublanes) * sublanes
    fitting = TILE_BYTES // width
    if tile_tokens < LANES:
        fitting = min(fitting, num_out // sizes.least_tiles)
    return tile_tokens, min(_halved(sizes.tile_out, fitting), pl.cdiv(num_out, LANES) * LANES)


def _x_buffers(x: jax.Array, weight: QuantizedWeight, sizes: TileSizes) -> int:
    """2, of which one is loaded while the other is multiplied; 1 if tiles of many inputs would have fewer tokens then:
    weights with groups are scaled for each tile of tokens, which takes longer than loading x.
    """
    num_tokens, num_in = x.shape
    fitting = _halved(sizes.tile_tokens, X_BYTES // (2 * num_in * x.dtype.itemsize))
    return 1 if weight.has_groups and min(num_tokens, sizes.tile_tokens) > fitting else 2


def _sublanes(x: jax.Array) -> int:
    """Rows of a register."""
    return 32 // x.dtype.itemsize


def _halved(most: int, fitting: int) -> int:
    """`most`, halved until it fits; at least LANES."""
    while most > max(LANES, fitting):
        most //= 2
    return most


class _Arrays(NamedTuple):
    """What the kernel reads, or in the kernel refs to tiles of it; what there is not is None."""

    x: Any  # [T, E]: bfloat16, or int8 if rounded; the last tile may have fewer tokens
    data: Any  # [F, bytes of E]: int8 or fp8; int4 as pairs in uint8
    scale: Any  # float32[J, F], or [1, F] without groups
    row_scale: Any = None  # float32[T, 1]: only of rounded x
    zero: Any = None  # uint8[J, F]: only of int4
    bias: Any = None  # [1, F]


class _Scratch(NamedTuple):
    """VMEM, or in the kernel refs to it."""

    sums: Any  # [tile of T, tile of F]: float32, or int32 of integers; of int4 UNIT times the sums
    # float32[J, tile of F]: UNIT * (zero - 8), since single rows of bytes are not addressable.
    zero: Any = None


def _call(
    arrays: _Arrays,
    weight: QuantizedWeight,
    tiles: tuple[int, int],
    x_buffers: int,
    dtype: jnp.dtype,
    interpret,
) -> jax.Array:
    x, num_out, (tile_tokens, tile_out) = arrays.x, weight.shape[0], tiles

    def of_tokens(array, **mode):
        if array is not None:
            return pl.BlockSpec((tile_tokens, array.shape[1]), lambda t, o: (t, 0), **mode)

    def of_outputs(array):
        if array is not None:
            return pl.BlockSpec((array.shape[0], tile_out), lambda t, o: (0, o))

    specs = _Arrays(
        x=of_tokens(x, pipeline_mode=pl.Buffered(x_buffers)),
        data=pl.BlockSpec((tile_out, arrays.data.shape[1]), lambda t, o: (o, 0)),
        scale=of_outputs(arrays.scale),
        row_scale=of_tokens(arrays.row_scale),
        zero=of_outputs(arrays.zero),
        bias=of_outputs(arrays.bias),
    )
    scales = x.shape[0] > LANES
    sum_dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    zero = None
    if arrays.zero is not None:
        zero = pltpu.VMEM((arrays.zero.shape[0], tile_out), jnp.float32)
    return pl.pallas_call(
        partial(_body, group_size=weight.group_size if weight.has_groups else None, scales=scales),
        grid=(pl.cdiv(x.shape[0], tile_tokens), pl.cdiv(num_out, tile_out)),
        in_specs=(specs,),
        out_specs=pl.BlockSpec((tile_tokens, tile_out), lambda t, o: (t, o)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], num_out), dtype),
        scratch_shapes=(_Scratch(pltpu.VMEM((tile_tokens, tile_out), sum_dtype), zero),),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=VMEM_BYTES if x_buffers == 2 else VMEM_BYTES_OF_ONE,
        ),
        interpret=interpret,
        name="quant_matmul",
    )(arrays)


def _body(refs: _Arrays, out_ref, scratch: _Scratch, *, group_size: int | None, scales: bool):
    """group_size: None without groups. scales: weights with groups, not sums."""
    sums = scratch.sums
    sums[...] = jnp.zeros(sums.shape, sums.dtype)
    if group_size is not None:
        is_int4 = refs.data.dtype == jnp.uint8
        if refs.zero is not None:
            zero = refs.zero[...].astype(jnp.int32).astype(jnp.float32)
            scratch.zero[...] = (zero - MIDDLE) * UNIT
        if scales:
            _add_scaled(refs, scratch, group_size)
        elif is_int4:
            _add_int4(refs, scratch, group_size)
        else:
            _add_groups(refs, sums, group_size)
        out = sums[...] * (1.0 / UNIT) if is_int4 else sums[...]
    else:
        _add_chunks(refs, sums)
        out = sums[...].astype(jnp.float32)
        if refs.row_scale is not None:
            out = out * refs.row_scale[...]
        out = out * refs.scale[...]
    if refs.bias is not None:
        out = out + refs.bias[...].astype(jnp.float32)
    out_ref[...] = out.astype(out_ref.dtype)


def _add_chunks(refs: _Arrays, sums) -> None:
    """int8 and fp8 without groups: chunks of inputs, in order."""

    def add(chunk):
        x, w = refs.x[:, chunk], refs.data[:, chunk]
        sums[...] += dot_transposed(x, w if x.dtype == jnp.int8 else _widen(w), sums.dtype)

    in_chunks(refs.x.shape[1], CHUNK, add)


def _widen(w):
    return _floats(w).astype(jnp.bfloat16) if w.dtype == jnp.int8 else w.astype(jnp.bfloat16)


def _floats(w):
    return w.astype(jnp.int32).astype(jnp.float32) if w.dtype == jnp.int8 else w.astype(jnp.float32)


def _add_groups(refs: _Arrays, sums, group_size: int) -> None:
    """int8 and fp8 with groups, in order."""

    def add(index):
        group = pl.ds(pl.multiple_of(index * group_size, LANES), group_size)
        part = dot_transposed(refs.x[:, group], _widen(refs.data[:, group]))
        sums[...] += part * refs.scale[pl.ds(index, 1), :]

    _repeat(refs.scale.shape[0], max(1, INPUTS_AT_ONCE // group_size), add)


def _repeat(count: int, at_once: int, act: Callable[[Any], None]) -> None:
    """Calls act(i) for i in [0, count), in order, `at_once` of them in an iteration."""

    def some(i, _):
        for number in range(at_once):
            act(i * at_once + number)

    if count >= at_once:
        lax.fori_loop(0, count // at_once, some, None)
    for index in range(count - count % at_once, count):
        act(index)


def _add_int4(refs: _Arrays, scratch: _Scratch, group_size: int) -> None:
    """int4: slices of LANES bytes of each output, in order: a pair of groups, or several pairs of smaller ones."""
    per_slice, num_slices = 2 * LANES // group_size, refs.data.shape[1] // LANES

    def add(index):
        data = refs.data[:, pl.ds(pl.multiple_of(index * LANES, LANES), LANES)]
        planes = [_widen(plane) for plane in _planes(data)]
        x = refs.x[:, pl.ds(pl.multiple_of(index * 2 * LANES, LANES), 2 * LANES)]
        total = scratch.sums[...]
        for number in range(per_slice):
            first = number // 2 * group_size
            x_group = x[:, number * group_size : (number + 1) * group_size]
            w_group = planes[number % 2][:, first : first + group_size]
            row = pl.ds(index * per_slice + number, 1)
            part = dot_transposed(x_group, w_group)
            if refs.zero is not None:
                sums = x_group.astype(jnp.float32).sum(axis=1, keepdims=True)
                part -= sums * scratch.zero[row, :]
            total += part * refs.scale[row, :]
        scratch.sums[...] = total

    _repeat(num_slices, INPUTS_AT_ONCE // (2 * LANES), add)


def _add_scaled(refs: _Arrays, scratch: _Scratch, group_size: int) -> None:
    """Weights with groups, scaled and rounded: about equally many slices of LANES bytes of each output at once, in
    order.
    """
    num_slices = refs.data.shape[1] // LANES
    per_slice = refs.x.shape[1] // num_slices  # inputs
    at_once = pl.cdiv(num_slices, pl.cdiv(num_slices, INPUTS_AT_ONCE // per_slice))

    def add(inputs):
        first = inputs.start // per_slice
        slices = (first + number for number in range(inputs.size // per_slice))
        weights = [_scaled(refs, scratch, index, group_size) for index in slices]
        w = jnp.concatenate(weights)
        scratch.sums[...] += jnp.dot(refs.x[:, inputs], w, preferred_element_type=jnp.float32)

    in_chunks(refs.x.shape[1], at_once * per_slice, add)


def _scaled(refs: _Arrays, scratch: _Scratch, index, group_size: int) -> jax.Array:
    """bfloat16[inputs of slice `index`, F]: outputs in lanes, as in scales. 8 bits are transposed faster than 16."""
    data = refs.data[:, pl.ds(pl.multiple_of(index * LANES, LANES), LANES)].T
    if data.dtype != jnp.uint8:
        scale = refs.scale[pl.ds(index * LANES // group_size, 1), :]
        return (_floats(data) * scale).astype(jnp.bfloat16)
    planes, per_slice = _planes(data), 2 * LANES // group_size
    groups = []
    for number in range(per_slice):
        first, row = number // 2 * group_size, pl.ds(index * per_slice + number, 1)
        w = _floats(planes[number % 2][first : first + group_size])
        if refs.zero is not None:
            w -= scratch.zero[row, :]
        groups.append((w * refs.scale[row, :]).astype(jnp.bfloat16))
    return jnp.concatenate(groups)


def _planes(data: jax.Array) -> list[jax.Array]:
    """UNIT (q - 8) of the low and the high halves of bytes, as int8."""
    upper = jnp.uint32(0xF0F0F0F0)
    # In the upper half of a signed byte q with its highest bit flipped is 16 (q - 8).
    words = pltpu.bitcast(data, jnp.uint32) ^ jnp.uint32(0x88888888)
    return [pltpu.bitcast(half & upper, jnp.int8) for half in (words << 4, words)]
