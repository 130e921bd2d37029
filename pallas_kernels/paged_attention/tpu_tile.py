"""The arithmetic of the TPU kernel: tiles of keys in VMEM for a tile of queries.

Letters as in `tpu.py`. (Online softmax: Milakov and Gimelshein, arXiv:1805.02867.) Heads are unrolled as far as
`Shape.heads_at_once` says, so that instructions of one fill the latencies of another. With one query per row registers
hold the scores of all heads: first come all scores, then all weights, then all products with V. Results are stored
last, because the compiler does not reorder a store and a load that it cannot tell apart. With several queries the
scores of the next head are computed before the weights of this one. Knows nothing of copies and of who wrote the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import LANES, repeat, wide
from pallas_kernels.paged_attention import tpu_spread
from pallas_kernels.paged_attention.tpu_fp8 import STORED_FLOATS
from pallas_kernels.paged_attention.tpu_shape import (
    QUERY_BUFFERS,
    Shape,
)
from pallas_kernels.paged_attention.tpu_spread import Spread

MASK = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: no difference of two scores is NaN
LOG2E = math.log2(math.e)


class Scratch(NamedTuple):
    """VMEM and semaphores of `tpu_attend.py`. K': see `tpu_layout.to_tiles`."""

    kv: Any  # [kv_buffers, blocks, S, width] of the pool's dtype
    # [QUERY_BUFFERS, K', P, A, W]; if `spreads_heads` [QUERY_BUFFERS, tile_tokens, H * D]; if `comes_by_head`
    # [QUERY_BUFFERS, K', G, tile_q, W]
    queries: Any
    out: Any  # [2, ..] likewise, W that of values
    top: Any  # float32[K', A, LANES] greatest score so far, in every lane
    # float32[K', A, LANES] sums of the weights so far, of each lane those of every LANES-th key
    total: Any
    acc: Any  # float32[K', P, A, W], W that of values
    kv_sems: Any
    query_sems: Any
    out_sems: Any
    spread: Spread | None = None  # if `spreads_heads`
    scale_zero: Any = None  # [kv_buffers, blocks, scale_rows * K, S]
    factors: Any = None  # float32[tiles of a fetch, K, 4, B]: scale and zero of K, of V


def scratch_shapes(shape: Shape, pools: list) -> Scratch:
    num_blocks, buffers = shape.fetch_kv // shape.block_size, shape.kv_buffers
    stacks, rows = shape.num_stacks, shape.rows
    column = pltpu.VMEM((stacks, rows, LANES), jnp.float32)
    tile = (stacks, shape.num_planes, rows, shape.read_lanes)
    sums = out = (stacks, shape.num_planes, rows, shape.value_lanes)
    if shape.spreads_heads:
        tile = out = (shape.tile_tokens, shape.num_heads * shape.head_dim)
    if shape.comes_by_head:
        tile = (shape.num_kv_heads, shape.group, shape.tile_q, shape.read_lanes)
    scratch = Scratch(
        kv=pltpu.VMEM((buffers, num_blocks, shape.block_size, shape.width), shape.pool_dtype),
        queries=pltpu.VMEM((QUERY_BUFFERS, *tile), shape.dtype),
        out=pltpu.VMEM((2, *out), shape.dtype),
        top=column,
        total=column,
        acc=pltpu.VMEM(sums, jnp.float32),
        kv_sems=pltpu.SemaphoreType.DMA((buffers,)),
        query_sems=pltpu.SemaphoreType.DMA((QUERY_BUFFERS,)),
        out_sems=pltpu.SemaphoreType.DMA((2,)),
        spread=tpu_spread.scratch_shapes(shape) if shape.spreads_heads else None,
    )
    if not shape.scale_rows:
        return scratch
    heads = shape.num_kv_heads
    return scratch._replace(
        scale_zero=pltpu.VMEM(
            (buffers, num_blocks, shape.scale_rows * heads, shape.block_size),
            pools[1].dtype,
        ),
        factors=pltpu.VMEM((shape.tiles_of_fetch, heads, 4, shape.tile_kv), jnp.float32),
    )


def begin(shape: Shape, scratch: Scratch) -> None:
    scratch.top[...] = jnp.full(scratch.top.shape, MASK, jnp.float32)
    scratch.total[...] = jnp.zeros(scratch.total.shape, jnp.float32)
    scratch.acc[...] = jnp.zeros(scratch.acc.shape, jnp.float32)


def clear_others(shape: Shape, scratch: Scratch, stage, first, end) -> None:
    """Zeros for what is none of the fetch's keys [first, end), in tiles with one: a weight of 0 times what lies there
    may be NaN.

    Blocks that were not fetched hold another row's keys, which must not matter even if they are no numbers.
    """
    kv, block_size = scratch.kv, shape.block_size
    empty = jnp.zeros(kv.shape[2:], kv.dtype)

    def clear(number):
        kv[stage, number] = empty

    def keep(number):
        values = wide(kv[stage, number])
        row = number * block_size + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        kept = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
        kv[stage, number] = kept.astype(kv.dtype)

    bits, within = block_size.bit_length() - 1, block_size - 1
    first_block, end_block = first >> bits, (end + within) >> bits
    first_of_tiles, end_of_tiles = 0, kv.shape[1]
    if shape.tiles_of_fetch > 1:
        of_tile = shape.tile_kv // block_size
        first_of_tiles, end_of_tiles = first_block & -of_tile, (end_block + of_tile - 1) & -of_tile
    repeat(first_of_tiles, first_block, clear)
    repeat(end_block, end_of_tiles, clear)
    pl.when(first & within != 0)(lambda: keep(first_block))
    pl.when(end & within != 0)(lambda: keep(end_block - 1))


def widen_factors(shape: Shape, scratch: Scratch, stage, first, end) -> None:
    """Scales and zeros of the fetch's keys [first, end) in float32, and 0 for all others."""
    if scratch.scale_zero is None or scratch.factors is None:
        return
    for number in range(scratch.kv.shape[1]):
        values = scratch.scale_zero[stage, number].astype(jnp.float32)
        key = number * shape.block_size + lax.broadcasted_iota(jnp.int32, values.shape, 1)
        values = jnp.where((key >= first) & (key < end), values, 0.0)
        tile, first_key = divmod(number * shape.block_size, shape.tile_kv)
        lanes = pl.ds(first_key, shape.block_size)
        for head in range(shape.num_kv_heads):
            first_row = shape.scale_rows * head
            scratch.factors[tile, head, :, lanes] = values[first_row : first_row + 4]


def add_tiles(shape: Shape, scratch: Scratch, queries, stage, tiles, visible) -> None:
    """Tiles of a fetch, in order, for the queries of a unit, all heads.

    queries: see `Attend.operand_of`; tiles: their numbers within the fetch, several only with one query per row;
    visible: bool[1 or A, B], or None if all keys are.
    """
    heads, stack = shape.heads_at_once, shape.stack
    num_stacks, lanes = heads // stack, heads // shape.period * shape.period_lanes
    same_lanes = all(shape.lanes(i, False)[0] == shape.lanes(i, True)[0] for i in range(heads))

    def some(number):
        base, first = number * lanes, number * num_stacks
        if not isinstance(number, int):
            base = pl.multiple_of(base, LANES)

        def score(i, tile):
            keys = _read(shape, scratch, (stage, tile), base, i, False)
            factors = _factors(shape, scratch, tile, first + i)
            own = _in_own_lanes(shape, queries[first + i])
            return keys, factors, _scores(shape, own, keys, factors, visible)

        def weigh(i, tile, scored, before):
            keys, factors, scores = scored
            values = keys if same_lanes else _read(shape, scratch, (stage, tile), base, i, True)
            if shape.is_of_latents:
                values = [x[:, : shape.value_lanes] for x in keys]
            return _softmax(shape, before, scores), values, factors

        def sums(i):
            accs = [scratch.acc[first + i, plane] for plane in range(shape.num_planes)]
            return _Sums(scratch.top[first + i], scratch.total[first + i], accs)

        def write(i, sums):
            scratch.top[first + i], scratch.total[first + i] = sums.top, sums.total
            for plane, acc in enumerate(sums.accs):
                scratch.acc[first + i, plane] = acc

        of_stacks = range(num_stacks)
        if shape.tile_q == 1:
            scores = [[score(i, tile) for i in of_stacks] for tile in tiles]
            so_far = [sums(i) for i in of_stacks]
            for tile, scored in zip(tiles, scores, strict=True):
                weights = [weigh(i, tile, scored[i], so_far[i]) for i in of_stacks]
                so_far = [_added(shape, so_far[i], *weights[i]) for i in of_stacks]
            for i in of_stacks:
                write(i, so_far[i])
            return
        ahead = score(0, tiles[0])
        for i in of_stacks:
            scored = ahead
            if i + 1 < num_stacks:
                ahead = score(i + 1, tiles[0])
            before = sums(i)
            write(i, _added(shape, before, *weigh(i, tiles[0], scored, before)))

    if heads == shape.num_kv_heads:
        some(0)
    else:
        repeat(0, shape.num_kv_heads // heads, some)


def _read(shape: Shape, scratch: Scratch, where, base, stack: int, value: bool) -> list[jax.Array]:
    """K or V of a stack, by planes: [B, W'].

    where: stage, tile; stack: counted from those whose lanes begin at `base`.
    """
    (stage, tile), blocks = where, shape.tile_kv // shape.block_size
    heads = []
    for head in range(stack * shape.stack, (stack + 1) * shape.stack):
        first = base + head // shape.period * shape.period_lanes
        lanes = pl.ds(first + shape.lanes(head, value)[0], shape.read_lanes)
        data = scratch.kv[stage, pl.ds(tile * blocks, blocks), :, lanes]
        heads.append(_planes(shape, data.reshape(shape.tile_kv, shape.read_lanes)))
    return [jnp.concatenate(planes, axis=1) for planes in zip(*heads, strict=True)]


def _in_own_lanes(shape: Shape, queries: jax.Array) -> list[jax.Array]:
    """[P, A, W], or [G, tile_q, W], → [A, W'] by planes: a row is 0 in the lanes of the stack's other heads."""
    if shape.comes_by_head:
        queries = queries.reshape(1, shape.rows, -1)
    planes = [queries[plane] for plane in range(shape.num_planes)]
    if shape.stack == 1:
        return planes
    row, group = lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0), shape.group
    is_own = [(row >= i * group) & (row < (i + 1) * group) for i in range(shape.stack)]

    def placed(plane):
        plane = plane.astype(jnp.float32)
        return jnp.concatenate([jnp.where(own, plane, 0.0) for own in is_own], axis=1)

    return [placed(plane).astype(shape.dtype) for plane in planes]


def _planes(shape: Shape, data: jax.Array) -> list[jax.Array]:
    """What the MXU multiplies of stored values [B, W]: for int8 and int4 the integers, whose scales come later; of fp8
    the bits, see `tpu_fp8.py`.
    """
    if shape.format is None:
        return [data]
    if shape.format in STORED_FLOATS:
        values = pltpu.bitcast(data, STORED_FLOATS[shape.format])
        return [values if shape.dtype == jnp.bfloat16 else values.astype(shape.dtype)]
    if shape.format == "int8":
        return [data.astype(jnp.int32).astype(jnp.float32).astype(shape.dtype)]
    words = pltpu.bitcast(data, jnp.uint32)
    halves = (words & jnp.uint32(0x0F0F0F0F), (words >> 4) & jnp.uint32(0x0F0F0F0F))
    integers = [pltpu.bitcast(half, jnp.uint8).astype(jnp.int32) for half in halves]
    return [x.astype(jnp.float32).astype(shape.dtype) for x in integers]


def _factors(shape: Shape, scratch: Scratch, tile, stack) -> list[jax.Array] | None:
    """Scale and zero of K, of V, as rows of queries need them: [1 or A, B] each."""
    if scratch.factors is None:
        return None
    of_heads = [scratch.factors[tile, stack * shape.stack + i] for i in range(shape.stack)]
    row = lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0)
    found = []
    for kind in range(4):
        rows = of_heads[-1][kind : kind + 1]
        for i in range(shape.stack - 2, -1, -1):
            rows = jnp.where(row < (i + 1) * shape.group, of_heads[i][kind : kind + 1], rows)
        found.append(rows)
    return found


def _dot(shape: Shape, x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if shape.dtype == jnp.float32 else None
    return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision, jnp.float32)


def _scores(shape: Shape, queries, keys, factors, visible) -> jax.Array:
    """[A, B], without the scales that `_power` knows. queries: [A, W'] by planes.

    With k = (n - z) s for stored n, zero z and scale s, q.k = s (q.n - z sum(q)).
    """
    soft_cap = shape.mask[2]
    scores = reduce(add, (_dot(shape, queries[plane], x, 1) for plane, x in enumerate(keys)))
    if factors is not None:
        sums = sum(
            queries[plane].astype(jnp.float32).sum(axis=1, keepdims=True)
            for plane in range(shape.num_planes)
        )
        scores = (scores - sums * factors[1]) * factors[0]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores * (_scale(shape) / soft_cap))
    return scores if visible is None else jnp.where(visible, scores, MASK)


def _exponent(shape: Shape) -> float:
    """What a score is multiplied by to be a power of 2."""
    return LOG2E * (_scale(shape) if shape.mask[2] is None else 1.0)


def _scale(shape: Shape) -> float:
    return shape.mask[0] * shape.unit


def _power(shape: Shape, difference: jax.Array) -> jax.Array:
    """e to the power of a difference of two scores, which are not scaled yet.

    Nothing else needs the scale, and the compiler would rather scale all scores twice than keep them in VMEM.
    """
    return jnp.exp2(difference * _exponent(shape))


class _Sums(NamedTuple):
    """The sums over all tiles so far, as in `Scratch`."""

    top: jax.Array
    total: jax.Array
    accs: list[jax.Array]  # by planes


class _Softmax(NamedTuple):
    """The softmax of a tile of keys, with what came before."""

    weights: jax.Array  # [A, B]
    rescale: jax.Array  # [A, LANES]: what sums so far are multiplied by, in every lane
    top: jax.Array  # as in `Scratch`
    total: jax.Array


def _softmax(shape: Shape, before: _Sums, scores: jax.Array) -> _Softmax:
    top = jnp.maximum(before.top, scores.max(axis=1, keepdims=True))
    weights = _power(shape, scores - _over(top, scores))
    rescale = _power(shape, before.top - top)
    # Lanes are added up when the unit ends, which moves none between them here.
    chunks = [weights[:, i : i + LANES] for i in range(0, shape.tile_kv, LANES)]
    return _Softmax(weights, rescale, top, before.total * rescale + reduce(add, chunks))


def _added(shape: Shape, before: _Sums, softmax: _Softmax, values, factors) -> _Sums:
    """The sums with a tile's values. Of quantised ones w s n - w s z is summed with w s rounded as the MXU takes it, so
    that both parts have the same rounding.
    """
    weights = softmax.weights
    weights = (weights if factors is None else weights * factors[2]).astype(shape.dtype)
    offset = 0.0
    if factors is not None:
        offset = (weights.astype(jnp.float32) * factors[3]).sum(axis=1, keepdims=True)
    accs = []
    for acc, x in zip(before.accs, values, strict=True):
        product = _own_lanes(shape, _dot(shape, weights, x, 0))
        accs.append(acc * _over(softmax.rescale, acc) + (product - offset))
    return _Sums(softmax.top, softmax.total, accs)


def _own_lanes(shape: Shape, product: jax.Array) -> jax.Array:
    """[A, W'] → [A, W], of each row the lanes of its own head."""
    row = lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0)
    width = product.shape[1] // shape.stack
    last = shape.stack - 1
    own = product[:, last * width :]
    for i in range(last - 1, -1, -1):
        of_head = product[:, i * width : (i + 1) * width]
        own = jnp.where(row < (i + 1) * shape.group, of_head, own)
    return own


def _over(column: jax.Array, like: jax.Array) -> jax.Array:
    """[A, LANES] with the same in every lane, as wide as `like`: no lane has to move."""
    return jnp.concatenate([column] * (like.shape[1] // LANES), axis=1)


def finish(shape: Shape, sinks_ref, scratch: Scratch, put: Callable) -> None:
    """Divides by the sum of weights, and calls put(stack, plane, result float32[A, W])."""

    def one_stack(stack):
        top, total = (
            scratch.top[stack][:, :1],
            scratch.total[stack].sum(axis=1, keepdims=True),
        )
        factor = shape.unit / total
        if sinks_ref is not None:
            top, sink = top * _exponent(shape), sinks_ref[stack] * LOG2E
            new_top = jnp.maximum(top, sink)
            rescale = jnp.exp2(top - new_top)
            factor = shape.unit * rescale / (total * rescale + jnp.exp2(sink - new_top))
        for plane in range(shape.num_planes):
            put(stack, plane, scratch.acc[stack, plane] * factor)

    repeat(0, shape.num_stacks, one_stack)
