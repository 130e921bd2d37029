"""The second phase of the TPU kernel: packed queries attend to the keys of their rows. Letters as in `tpu.py`.

A *unit* is a tile of packed queries and a row with tokens in it. Its keys come in tiles of `tile_kv`, the next on its
way while one is computed, over the border of two units too. Tiles begin at multiples of `tile_kv` whatever the batch
is, and so does the order of every sum: a row's result depends on nothing but the row. (Online softmax: Milakov and
Gimelshein, arXiv:1805.02867.) Knows nothing of who wrote the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write.quantized import FLOATS, QuantizedPool
from pallas_kernels.paged_attention.tpu_layout import KV_BUFFERS, LANES, Pool, Rows, Shape
from pallas_kernels.paged_attention.tpu_write import repeat, wide

MASK = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: no difference of two scores is NaN


class Scratch(NamedTuple):
    """VMEM and semaphores of the second phase."""

    kv: Any  # [buffers, blocks, S, width] of the pool's dtype
    queries: Any  # [buffers, K, P, A, W]
    out: Any  # [2, K, P, A, W]
    top: Any  # float32[K, A, LANES] greatest score so far, in every lane
    total: Any  # float32[K, A, LANES] of the weights so far, in every lane
    acc: Any  # float32[K, P, A, W]
    kv_sems: Any
    query_sems: Any
    out_sems: Any
    scale_zero: Any = None  # [buffers, blocks, scale_rows * K, S]
    factors: Any = None  # float32[K, 4, B]: scale and zero of K, of V


def scratch_shapes(shape: Shape, pool: Pool) -> Scratch:
    num_blocks = shape.tile_kv // shape.block_size
    heads, tile = shape.num_kv_heads, (shape.num_planes, shape.rows, shape.read_lanes)
    column = pltpu.VMEM((heads, shape.rows, LANES), jnp.float32)
    scratch = Scratch(
        kv=pltpu.VMEM((KV_BUFFERS, num_blocks, shape.block_size, shape.width), shape.pool_dtype),
        queries=pltpu.VMEM((KV_BUFFERS, heads, *tile), shape.dtype),
        out=pltpu.VMEM((2, heads, *tile), shape.dtype),
        top=column,
        total=column,
        acc=pltpu.VMEM((heads, *tile), jnp.float32),
        kv_sems=pltpu.SemaphoreType.DMA((KV_BUFFERS,)),
        query_sems=pltpu.SemaphoreType.DMA((KV_BUFFERS,)),
        out_sems=pltpu.SemaphoreType.DMA((2,)),
    )
    if not isinstance(pool, QuantizedPool) or pool.scale_zero is None:
        return scratch
    return scratch._replace(
        scale_zero=pltpu.VMEM(
            (KV_BUFFERS, num_blocks, shape.scale_rows * heads, shape.block_size),
            pool.scale_zero.dtype,
        ),
        factors=pltpu.VMEM((heads, 4, shape.tile_kv), jnp.float32),
    )


@dataclass(frozen=True)
class Units:
    """The units of the second phase, in the scalar memory, and what each reads."""

    rows: Rows
    row: jax.Array  # int32[..]
    query_tile: jax.Array  # int32[..]
    visit: jax.Array  # int32[..] query tiles that come before, which say what buffer it has
    total: jax.Array  # int32

    def first_tile(self, unit):
        """The first tile of keys."""
        return self.keys(unit)[0] // self.rows.shape.tile_kv

    def keys(self, unit):
        """The positions [first, end) of keys that queries of the unit see."""
        shape = self.rows.shape
        first, end, before = self.rows.queries(self.row[unit])
        tile = self.query_tile[unit]
        end_key = jnp.minimum(end, (tile + 1) * shape.tile_q) + before
        _, window, _ = shape.mask
        if window is None:
            return jnp.int32(0), end_key
        position = jnp.maximum(first, tile * shape.tile_q) + before
        return jnp.maximum(position - window + 1, 0), end_key

    def keys_of_tile(self, unit, tile):
        """The same, of one tile and counted from its begin."""
        first, end = self.keys(unit)
        begin, tile_kv = tile * self.rows.shape.tile_kv, self.rows.shape.tile_kv
        return jnp.maximum(first - begin, 0), jnp.minimum(end - begin, tile_kv)

    def is_last_tile(self, unit, tile):
        return (tile + 1) * self.rows.shape.tile_kv >= self.keys(unit)[1]

    def following(self, unit, tile):
        """The turn after that. There may be one beyond the last unit, which is nobody's."""
        inside = jnp.minimum(unit, self.row.shape[0] - 1)
        is_last = self.is_last_tile(inside, tile)
        next_first = self.first_tile(jnp.minimum(inside + 1, self.row.shape[0] - 1))
        return unit + is_last.astype(jnp.int32), jnp.where(is_last, next_first, tile + 1)

    def begins_visit(self, unit):
        return (unit == 0) | (self.visit[unit] != self.visit[jnp.maximum(unit - 1, 0)])

    def ends_visit(self, unit):
        after = jnp.minimum(unit + 1, self.row.shape[0] - 1)
        return (unit == self.total - 1) | (self.visit[unit] != self.visit[after])


@dataclass(frozen=True, kw_only=True)
class Attend:
    """A turn is one tile of keys of one unit."""

    units: Units
    q_ref: Any  # see `tpu_layout.to_tiles`
    pool_refs: Sequence
    out_ref: Any  # as q_ref
    sinks_ref: Any  # float32[K, A, 1] or None
    scratch: Scratch

    @property
    def shape(self) -> Shape:
        return self.units.rows.shape

    def run(self) -> None:
        units = self.units
        first = (jnp.int32(0), units.first_tile(0))
        later = first
        for number in range(KV_BUFFERS - 1):
            self.prefetch(*later, number)
            later = units.following(*later)
        carry = (jnp.int32(0), *first, *later)
        lax.while_loop(lambda carry: carry[1] < units.total, self.turn, carry)
        last = units.visit[jnp.maximum(units.total - 1, 0)]
        num_visits = jnp.where(units.total > 0, last + 1, 0)
        repeat(jnp.maximum(num_visits - 2, 0), num_visits, lambda i: self.out_copy(i, 0).wait())

    def turn(self, carry):
        units, scratch = self.units, self.scratch
        number, unit, tile, later_unit, later_tile = carry
        slot = number % KV_BUFFERS
        self.prefetch(later_unit, later_tile, number + KV_BUFFERS - 1)
        pl.when(tile == units.first_tile(unit))(lambda: self.begin_unit(unit))
        self.for_kv_copies(unit, tile, slot, lambda copy: copy.wait())
        _clear_others(self.shape, scratch, slot, *units.keys_of_tile(unit, tile))
        position = _tokens(self.shape, units.query_tile[unit])
        position += units.rows.queries(units.row[unit])[2]
        queries = scratch.queries.at[units.visit[unit] % KV_BUFFERS]
        _add_tile(self.shape, scratch, queries, slot, position, tile)
        pl.when(units.is_last_tile(unit, tile))(lambda: self.end_unit(unit))
        return number + 1, *units.following(unit, tile), *units.following(later_unit, later_tile)

    def prefetch(self, unit, tile, turn) -> None:
        @pl.when(unit < self.units.total)
        def _():
            is_first = (tile == self.units.first_tile(unit)) & self.units.begins_visit(unit)
            pl.when(is_first)(lambda: self.query_copy(unit).start())
            self.for_kv_copies(unit, tile, turn % KV_BUFFERS, lambda copy: copy.start())

    def query_copy(self, unit):
        slot = self.units.visit[unit] % KV_BUFFERS
        source, into = self.q_ref.at[self.units.query_tile[unit]], self.scratch.queries.at[slot]
        return pltpu.make_async_copy(source, into, self.scratch.query_sems.at[slot])

    def out_copy(self, visit, query_tile):
        slot = visit % 2
        source, into = self.scratch.out.at[slot], self.out_ref.at[query_tile]
        return pltpu.make_async_copy(source, into, self.scratch.out_sems.at[slot])

    def for_kv_copies(self, unit, tile, slot, act: Callable) -> None:
        """Calls act on the copy of each block with keys of the unit, data and scales."""
        units, scratch, block_size = self.units, self.scratch, self.shape.block_size
        first, end = units.keys_of_tile(unit, tile)
        buffers = [scratch.kv, scratch.scale_zero][: len(self.pool_refs)]

        def of_block(number):
            at = tile * (self.shape.tile_kv // block_size) + number
            block = units.rows.block(units.row[unit], at)
            for pool_ref, buffer in zip(self.pool_refs, buffers, strict=True):
                into, sem = buffer.at[slot, number], scratch.kv_sems.at[slot]
                act(pltpu.make_async_copy(pool_ref.at[block], into, sem))

        repeat(first // block_size, pl.cdiv(end, block_size), of_block)

    def begin_unit(self, unit) -> None:
        scratch = self.scratch

        @pl.when(self.units.begins_visit(unit))
        def _():
            self.query_copy(unit).wait()
            visit = self.units.visit[unit]
            # Of two visits ago; waiting needs no more than the size.
            pl.when(visit >= 2)(lambda: self.out_copy(visit, 0).wait())
            scratch.out[visit % 2] = jnp.zeros(scratch.out.shape[1:], scratch.out.dtype)

        scratch.top[...] = jnp.full(scratch.top.shape, MASK, jnp.float32)
        scratch.total[...] = jnp.zeros(scratch.total.shape, jnp.float32)
        scratch.acc[...] = jnp.zeros(scratch.acc.shape, jnp.float32)

    def end_unit(self, unit) -> None:
        units = self.units
        first, end = units.rows.queries(units.row[unit])[:2]
        token = _tokens(self.shape, units.query_tile[unit])
        mine, visit = (token >= first) & (token < end), units.visit[unit]
        _finish(self.shape, mine, self.sinks_ref, self.scratch, self.scratch.out.at[visit % 2])

        @pl.when(units.ends_visit(unit))
        def _():
            self.out_copy(visit, units.query_tile[unit]).start()


def _tokens(shape: Shape, query_tile) -> jax.Array:
    """int32[A, 1]: the packed token of each row of a query tile."""
    row = lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0)
    return query_tile * shape.tile_q + (row & (shape.tile_q - 1))


def _clear_others(shape: Shape, scratch: Scratch, slot, first, end):
    """Zeros for what is none of the tile's keys [first, end): a weight of 0 times what lies there may be NaN.

    Blocks that were not fetched hold another row's keys, which must not matter even if they are no numbers. Factors are
    widened on the way.
    """
    kv, block_size = scratch.kv, shape.block_size
    empty = jnp.zeros(kv.shape[2:], kv.dtype)

    def clear(number):
        kv[slot, number] = empty

    def keep(number):
        values = wide(kv[slot, number])
        row = number * block_size + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        kept = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
        kv[slot, number] = kept.astype(kv.dtype)

    first_block, end_block = first // block_size, pl.cdiv(end, block_size)
    repeat(0, first_block, clear)
    repeat(end_block, kv.shape[1], clear)
    pl.when(first % block_size != 0)(lambda: keep(first_block))
    pl.when(end % block_size != 0)(lambda: keep(end_block - 1))
    if scratch.scale_zero is None or scratch.factors is None:
        return
    for number in range(kv.shape[1]):
        values = scratch.scale_zero[slot, number].astype(jnp.float32)
        key = number * block_size + lax.broadcasted_iota(jnp.int32, values.shape, 1)
        values = jnp.where((key >= first) & (key < end), values, 0.0)
        lanes = pl.ds(number * block_size, block_size)
        for head in range(shape.num_kv_heads):
            first_row = shape.scale_rows * head
            scratch.factors[head, :, lanes] = values[first_row : first_row + 4]


def _add_tile(shape: Shape, scratch: Scratch, queries, slot, position, tile):
    """One tile of keys for the queries of a unit, at `position` int32[A, 1], all heads."""
    _, window, _ = shape.mask
    key = tile * shape.tile_kv + lax.broadcasted_iota(jnp.int32, (1, shape.tile_kv), 1)
    visible = key <= position
    if window is not None:
        visible &= key > position - window

    def read(lane):
        data = scratch.kv[slot, :, :, pl.ds(lane, shape.read_lanes)]
        return _planes(shape, data.reshape(shape.tile_kv, shape.read_lanes))

    def one_head(head, in_period, base):
        key_lane, value_lane = (shape.lanes(in_period, value)[0] for value in (False, True))
        keys = read(base + key_lane)
        values = keys if value_lane == key_lane else read(base + value_lane)
        factors = None if scratch.factors is None else scratch.factors[head]
        _add_head(shape, scratch, queries[head], (head, visible), (keys, values, factors))

    def one_period(number):
        base = number * (2 * shape.period * shape.head_lanes)
        if not isinstance(number, int):
            base = pl.multiple_of(base, LANES)
        for in_period in range(shape.period):
            one_head(number * shape.period + in_period, in_period, base)

    num_periods = shape.num_kv_heads // shape.period
    if num_periods == 1:
        one_period(0)
    else:
        repeat(0, num_periods, one_period)


def _planes(shape: Shape, data: jax.Array) -> list[jax.Array]:
    """What the MXU multiplies of stored values [B, W]: for int8 and int4 the integers, whose scales come later."""
    if shape.format is None:
        return [data]
    if shape.format in FLOATS:
        return [pltpu.bitcast(data, FLOATS[shape.format]).astype(shape.dtype)]
    if shape.format == "int8":
        return [data.astype(jnp.int32).astype(jnp.float32).astype(shape.dtype)]
    words = pltpu.bitcast(data, jnp.uint32)
    halves = (words & jnp.uint32(0x0F0F0F0F), (words >> 4) & jnp.uint32(0x0F0F0F0F))
    integers = [pltpu.bitcast(half, jnp.uint8).astype(jnp.int32) for half in halves]
    return [x.astype(jnp.float32).astype(shape.dtype) for x in integers]


def _add_head(shape: Shape, scratch: Scratch, queries, where, kv):
    """One tile of keys for one KV head. queries: [P, A, W]; where: head, visible bool[A, B]; kv: planes, factors.

    With k = (n - z) s for stored n, zero z and scale s, q.k = s (q.n - z sum(q)). For values w s n - w s z is summed
    with w s rounded as the MXU takes it, so that both parts have the same rounding.
    """
    (head, visible), (keys, values, factors) = where, kv
    scale, _, soft_cap = shape.mask
    precision = lax.Precision.HIGHEST if shape.dtype == jnp.float32 else None

    def dot(x, y, axis):
        dims = (((1,), (axis,)), ((), ()))
        return lax.dot_general(x, y, dims, precision, jnp.float32)

    scores = sum(dot(queries[plane], x, 1) for plane, x in enumerate(keys))
    if factors is not None:
        sums = sum(
            queries[plane].astype(jnp.float32).sum(axis=1, keepdims=True)
            for plane in range(shape.num_planes)
        )
        scores = (scores - sums * factors[1:2]) * factors[0:1]
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores * (1 / soft_cap))
    scores = jnp.where(visible, scores, MASK)
    top = scratch.top[head]
    new_top = jnp.maximum(top, scores.max(axis=1, keepdims=True))
    rescale = jnp.exp(top - new_top)
    weights = jnp.exp(scores - new_top[:, :1])
    scratch.top[head] = new_top
    scratch.total[head] = scratch.total[head] * rescale + weights.sum(axis=1, keepdims=True)
    weights = (weights if factors is None else weights * factors[2:3]).astype(shape.dtype)
    offset = 0.0
    if factors is not None:
        offset = (weights.astype(jnp.float32) * factors[3:4]).sum(axis=1, keepdims=True)
    for plane, x in enumerate(values):
        acc = scratch.acc[head, plane]
        scratch.acc[head, plane] = acc * rescale[:, :1] + (dot(weights, x, 0) - offset)


def _finish(shape: Shape, mine, sinks_ref, scratch: Scratch, out_ref):
    """Divides by the sum of weights. Rows that are not `mine` bool[A, 1] keep what another unit left."""

    def one_head(head):
        top, total = scratch.top[head][:, :1], scratch.total[head][:, :1]
        factor = 1.0 / total
        if sinks_ref is not None:
            sink = sinks_ref[head]
            new_top = jnp.maximum(top, sink)
            rescale = jnp.exp(top - new_top)
            factor = rescale / (total * rescale + jnp.exp(sink - new_top))
        for plane in range(shape.num_planes):
            out = scratch.acc[head, plane] * factor
            before = out_ref[head, plane].astype(jnp.float32)
            out_ref[head, plane] = jnp.where(mine, out, before).astype(shape.dtype)

    repeat(0, shape.num_kv_heads, one_head)
