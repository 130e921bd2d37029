"""A tile of rows times a tile of a quantized weight, in the kernels for TPUs of this operation and of grouped_matmul.

Weights are converted to integers that bfloat16 represents exactly, or to fp8's values, so they are not rounded, and
scales multiply float32 sums: of an output, or of a group, which for int4 is minus its zero times the sum of the group's
x. Or weights with groups are scaled in float32 and rounded to bfloat16, once. For int4 the kernels use q - 8 and zero -
8, so a weight without zeros needs no subtraction.

Sums are over chunks or groups of inputs in an order that depends only on the weight's shape.

Letters: T rows, E inputs, F outputs, J groups, G = E / J.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import LANES, dot_transposed, in_chunks
from pallas_kernels.quant_matmul.quantized import MIDDLE, QuantizedWeight, not_for_rounded_rows

CHUNK = 4096  # inputs multiplied at once. Sums are divided there, so it is never tuned
GROUP_SIZES = (32, 64, 128)  # of int4
# Inputs of weights with groups in an iteration. The MXU can begin one group before it has the results of another; with
# many tokens it sums that many. More would gain little, and large programs compile slowly.
INPUTS_AT_ONCE = 2048
UNIT = 16  # the kernel has UNIT * (q - 8), in the upper half of a byte


class Operands(NamedTuple):
    """What a kernel reads, or in it refs to tiles of it; what there is not is None. Those of weights may have an axis
    of experts before.
    """

    x: Any  # [T, E]: bfloat16, or int8 if rounded; the last tile may have fewer rows
    data: Any  # [F, bytes of E]: int8 or fp8; int4 as pairs in uint8
    scale: Any  # float32[J, F], or [1, F] without groups
    row_scale: Any = None  # float32[T, 1]: only of rounded x
    zero: Any = None  # uint8[J, F]: only of int4


class Scratch(NamedTuple):
    """VMEM, or in a kernel refs to it."""

    sums: Any  # [tile of T, tile of F]: float32, or int32 of integers; of int4 UNIT times the sums
    # float32[J, tile of F]: UNIT * (zero - 8), since single rows of bytes are not addressable.
    zero: Any = None


def unsupported_weight(
    dtype: jnp.dtype, weight: QuantizedWeight, *, round_x: bool = False
) -> str | None:
    """Why `product` does not support this dtype of x with such a weight, in one line; None if it does."""
    if dtype != jnp.bfloat16:
        return f"x is {dtype}; the kernel reads bfloat16"
    if round_x and (reason := not_for_rounded_rows(weight)):
        return reason
    num_in = weight.shape[-1]
    if weight.format == "int4":
        if weight.group_size not in GROUP_SIZES:
            return f"groups have {weight.group_size} inputs, none of {GROUP_SIZES}"
        if num_in % (2 * LANES):
            return f"{num_in} inputs are no multiple of {2 * LANES}, in two halves of bytes"
    elif num_in % LANES:
        return f"{num_in} inputs are no multiple of {LANES}"
    elif weight.has_groups and (weight.group_size % LANES or weight.group_size > CHUNK):
        return f"groups have {weight.group_size} inputs, no multiple of {LANES} up to {CHUNK}"
    return None


def scratch_of(operands: Operands, tile: tuple[int, int]) -> Scratch:
    """For tiles of so many rows and outputs."""
    zero = None
    if operands.zero is not None:
        zero = pltpu.VMEM((operands.zero.shape[-2], tile[1]), jnp.float32)
    dtype = jnp.int32 if operands.x.dtype == jnp.int8 else jnp.float32
    return Scratch(pltpu.VMEM(tile, dtype), zero)


def product(refs: Operands, scratch: Scratch, *, group_size: int | None, scales: bool) -> jax.Array:
    """float32[tile of T, tile of F]. group_size: None without groups. scales: weights with groups, not sums."""
    sums = scratch.sums
    sums[...] = jnp.zeros(sums.shape, sums.dtype)
    if group_size is None:
        _add_chunks(refs, sums)
        out = sums[...].astype(jnp.float32)
        if refs.row_scale is not None:
            out = out * refs.row_scale[...]
        return out * refs.scale[...]
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
    return sums[...] * (1.0 / UNIT) if is_int4 else sums[...]


def _add_chunks(refs: Operands, sums) -> None:
    """int8 and fp8 without groups: chunks of inputs, in order."""

    def add(chunk):
        x, w = refs.x[:, chunk], refs.data[:, chunk]
        sums[...] += dot_transposed(x, w if x.dtype == jnp.int8 else _widen(w), sums.dtype)

    in_chunks(refs.x.shape[1], CHUNK, add)


def _widen(w):
    return _floats(w).astype(jnp.bfloat16) if w.dtype == jnp.int8 else w.astype(jnp.bfloat16)


def _floats(w):
    return w.astype(jnp.int32).astype(jnp.float32) if w.dtype == jnp.int8 else w.astype(jnp.float32)


def _add_groups(refs: Operands, sums, group_size: int) -> None:
    """int8 and fp8 with groups, in order."""

    def add(index):
        group = pl.ds(pl.multiple_of(index * group_size, LANES), group_size)
        part = dot_transposed(refs.x[:, group], _widen(refs.data[:, group]))
        sums[...] += part * refs.scale[pl.ds(index, 1), :]

    _repeat(refs.scale.shape[0], max(1, _inputs_at_once(refs) // group_size), add)


def _inputs_at_once(refs: Operands) -> int:
    """Where sums are scaled: more rows make a larger program."""
    return INPUTS_AT_ONCE // (2 if refs.x.shape[0] > LANES else 1)


def _repeat(count: int, at_once: int, act: Callable[[Any], None]) -> None:
    """Calls act(i) for i in [0, count), in order, `at_once` of them in an iteration."""

    def some(i, _):
        for number in range(at_once):
            act(i * at_once + number)

    if count >= at_once:
        lax.fori_loop(0, count // at_once, some, None)
    for index in range(count - count % at_once, count):
        act(index)


def _add_int4(refs: Operands, scratch: Scratch, group_size: int) -> None:
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

    _repeat(num_slices, _inputs_at_once(refs) // (2 * LANES), add)


def _add_scaled(refs: Operands, scratch: Scratch, group_size: int) -> None:
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


def _scaled(refs: Operands, scratch: Scratch, index, group_size: int) -> jax.Array:
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
