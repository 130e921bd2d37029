"""Paged attention of rows with one query, for Hopper: bound by the pool's bytes.

Knows how a row's keys are cut into items, each read by one program. Letters and principles stand in `gpu.py`.

**Tile.** A program is one warpgroup. The *keys* are wgmma's 64 rows and the G query heads of a KV head its columns:
S' = K Q', O' = V' P'. So G pads to 8, not to 64, and accumulators are a few registers. A program takes items for one KV
head: parts of a row's keys, or groups of parts where there are enough (`gpu_layout.Items`). A group's parts are added
up here as `gpu_combine.py` would do it, so a row's result does not depend on which of the two did. A row's only item
gives its result; of several each gives its sums, and `gpu_combine.py` adds them. These take about
`gpu_layout.PARTS_BYTES` at most: where rows have more, they take turns. (Split keys: Dao et al., Flash-Decoding.)

**Stages.** Steps are numbered over all items of a program. Step i multiplies TILE keys, whose K and V lie in stage
i % S. To keep an H200's memory busy 4.8 TB/s x 1 us / 132 = 36 KB must be on their way to each SM; at D = 128 three
programs an SM with two stages of 64 keys (32 KB) have 96 to 192 KB, also where one item ends and the next begins.

At D = 512 an SM has room for one program with one stage: keys are copied while values are multiplied, and values
while keys are.

**Protocol.** The warpgroup starts all copies itself. Those for step i start at the end of step i - S, which may belong
to the previous item; the first S start before the first item. If an item has fewer than S tiles, copies for the next
one that no step of it starts are started when it begins. So is the copy of the next item's queries.

    buffer              producer         consumer          barrier                waits for
    queries [t % 2]     TMA for item t   wgmma of S'       queries_ready[t % 2]   the copy to arrive
    queries, free       wgmma of item t  TMA of item t+2   implied by reading S'  wgmma to have read them
    keys [i % S]        TMA for step i   wgmma of S'       keys.ready[i % S]      the tile's blocks to arrive
    values [i % S]      TMA for step i   wgmma of O'       values.ready[i % S]    the tile's blocks to arrive
    the same of latents the first columns of keys [i % S], which have arrived
    weights (P)         warpgroup        wgmma of O'       commit_smem            the writes to be visible
    wide, if quantised  warpgroup        wgmma             commit_smem            the same; K first, then V
    keys, values, free  wgmma of step i  TMA for step i+S  implied by reading O'  wgmma to have read them
    keys, free, S = 1   wgmma of S'      TMA for step i+1  implied by the maximum wgmma to have read them
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu_layout
from pallas_kernels.paged_attention.gpu_combine import Parts, combine, store_transposed
from pallas_kernels.paged_attention.gpu_decode_plan import (
    TILE,
    Item,
    Memory,
    Plan,
    memory_of,
    part_shape,
    pieces,
)
from pallas_kernels.paged_attention.gpu_tiles import (
    BY_HEAD,
    Options,
    PoolArrays,
    Source,
    Stages,
    Sums,
    added,
    clear_outside,
    hidden_zero,
    no_sums,
    normalised,
    scores,
    stage_of,
    weights,
    without_zeros,
)
from pallas_kernels.wgmma import Ref, added_product, filled, load, product, store


def decode(q, pool, block_table, kv_lens, options: Options, *, wanted: jax.Array | None = None):
    """One query a row: q [R, H, D], row r's at position `kv_lens[r] - 1` → [R, H, V].

    V is D, or the `value_dim` of latents, which have D columns here. Rows of length 0 give zeros. wanted: bool[R], None
    for all rows; other rows have length 0 and give anything.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = pool.shape[2] // 2, block_table.shape[1] * pool.shape[1]
    value_dim = Source.of(pool).value_dim or head_dim
    rows, columns = part_shape(num_heads // num_kv_heads, value_dim)
    most_groups = gpu_layout.Division.of(rows, columns).most_groups(num_keys, options.window)
    of_row = 4 * rows * columns * num_kv_heads * most_groups
    at_once = gpu_layout.rows_at_once(num_rows, of_row)
    of_rows = (q, block_table, kv_lens, jnp.ones_like(kv_lens, bool) if wanted is None else wanted)
    if at_once == num_rows:
        return _decode_rows(of_rows, pool, options)

    def in_turns(x):
        x = jnp.pad(x, ((0, -num_rows % at_once), *((0, 0) for _ in x.shape[1:])))
        return x.reshape(-1, at_once, *x.shape[1:])

    turns = jax.tree.map(in_turns, of_rows)
    out = lax.map(lambda some: _decode_rows(some, pool, options), turns)
    return out.reshape(-1, num_heads, value_dim)[:num_rows]


class _Inputs(NamedTuple):
    """What the kernel reads, or in the kernel refs to it."""

    queries: Any  # [R, K, columns, D], bfloat16 or float16
    query_sums: Any  # float32[R, K, columns], of each query; None if the pool has no scales
    block_table: Any  # int32[R, M]
    items: gpu_layout.Items
    pool: PoolArrays
    sinks: Any  # float32[K, columns], or None


class _Outputs(NamedTuple):
    """What the kernel writes, likewise."""

    parts: Parts  # of rows with several items
    results: Any  # [R, K, columns, rows] of other rows, see `Parts`


def _decode_rows(of_rows: tuple, pool, options: Options):
    q, block_table, kv_lens, wanted = of_rows
    num_rows, num_heads, head_dim = q.shape
    source, block_size, num_kv_heads = Source.of(pool), pool.shape[1], pool.shape[2] // 2
    group, value_dim = num_heads // num_kv_heads, source.value_dim or head_dim
    rows, columns = part_shape(group, value_dim)
    num_keys = block_table.shape[1] * block_size
    division = gpu_layout.Division.of(rows, columns)
    sizes = (num_kv_heads, num_keys, options.window)
    items = gpu_layout.items_of(kv_lens, wanted, division, *sizes)
    max_items = items.row.shape[0]
    plan = Plan.of(q, source, num_kv_heads, options, division, max_items)
    heads_by_kv = ((0, 0), (0, 0), (0, columns - group), (0, 0))
    queries = jnp.pad(q.reshape(num_rows, num_kv_heads, group, head_dim), heads_by_kv)

    def paged_decode(inputs: _Inputs, outputs: _Outputs, memory: Memory):
        _Program(plan, inputs, outputs, memory).run()

    kernel = plgpu.kernel(
        paged_decode,
        out_type=(
            _Outputs(
                parts=Parts(
                    sums=_float32(num_kv_heads, max_items, rows, columns),
                    stats=_float32(num_kv_heads, max_items, 4, columns),
                ),
                results=jax.ShapeDtypeStruct((num_rows, num_kv_heads, columns, rows), q.dtype),
            ),
        ),
        grid=(plan.num_programs,),
        grid_names=("program",),
        scratch_types=(memory_of(plan, q.dtype),),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=options.interpret,
    )
    query_sums = jnp.sum(queries, axis=3, dtype=jnp.float32) if source.has_scales else None
    sinks = options.sinks
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, group)
        sinks = jnp.pad(sinks, ((0, 0), (0, columns - group)))
    inputs = _Inputs(queries, query_sums, block_table, items, source.arrays, sinks)
    (made,) = kernel(inputs)
    out = combine(made.parts, items, sinks, made.results, options.interpret)
    if len(pieces(value_dim)) > 1:  # without what the second has in common with the first
        out = jnp.concatenate([out[..., :64], out[..., 64 - value_dim :]], axis=-1)
    return out[:, :, :group].reshape(num_rows, num_heads, value_dim)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class _Running(NamedTuple):
    """The sums over the tiles of a part so far, in registers.

    With k = (n - z) s for stored n, zero z and scale s, q.k = s (q.n - z sum(q)). Likewise p v = p s n - p s z, whose
    two parts are summed apart. n is centred (`Source.widen`) and s is large enough (`Source.boost`), so that rounding
    p s costs no more than rounding p.
    """

    accs: tuple  # float32[columns of a piece, G]: weights times V, of quantised pools n
    m: Any  # float32[G]: the maximum score, in units of log2
    total: Any  # float32[TILE, G]: weights, not yet summed over keys
    zeros: Any  # likewise: weights times zeros; None if the pool has no scales


class _Program:
    """One of `num_programs`. It takes every `num_programs`-th pair of an item and a KV head."""

    def __init__(self, plan: Plan, inputs: _Inputs, outputs: _Outputs, memory: Memory) -> None:
        self.plan, self.inputs, self.outputs, self.memory = plan, inputs, outputs, memory
        self.number, starts = lax.axis_index("program"), inputs.items.starts
        num_pairs = starts[starts.shape[0] - 1] * plan.num_kv_heads
        self.num_turns = pl.cdiv(num_pairs - self.number, plan.num_programs)

    def run(self):
        first, zero = self._item_of(jnp.int32(0)), jnp.int32(0)
        pl.when(self.num_turns > 0)(lambda: self._fetch_queries(first, zero))
        self._fetch_first(first, zero, self.plan.num_stages)
        lax.fori_loop(0, self.num_turns, self._attend, (first, zero))

    def _item_of(self, turn) -> Item:
        pair, is_there = self._pair(turn), turn < self.num_turns
        return Item.of(self.plan, self.inputs.items, pair, is_there)

    def _pair(self, turn):
        return self.number + turn * self.plan.num_programs

    def _attend(self, turn, carry):
        """carry: the item, and the number of steps before it. Returns the same for the next turn."""
        plan, (at, used) = self.plan, carry
        following = self._item_of(turn + 1)
        pl.when(turn + 1 < self.num_turns)(lambda: self._fetch_queries(following, turn + 1))
        self._fetch_first(following, used + at.num_tiles, plan.num_stages - at.num_tiles)
        slot = lax.rem(turn, jnp.int32(2))
        queries = self.memory.queries.at[slot]
        plgpu.barrier_wait(self.memory.queries_ready.at[slot])
        query_sums = None
        if plan.source.has_scales:
            query_sums = load(
                self.inputs.query_sums.at[at.row, at.head], layout=BY_HEAD, optimized=False
            )
        step = partial(self._step, at, following, used, queries, query_sums)
        if plan.in_groups:
            sums = self._sums_of_parts(at, step, queries.dtype)
        else:
            sums = self._sums(step, 0, at.num_tiles, queries.dtype)
        starts = self.inputs.items.starts
        is_only = starts[at.row + 1] - starts[at.row] == 1
        pl.when(is_only)(lambda: self._store_result(at, sums))
        pl.when(~is_only)(lambda: self._store_part(turn, at, sums))
        return following, used + at.num_tiles

    def _sums_of_parts(self, at: Item, step, dtype) -> Sums:
        """Over all parts of an item."""

        def add(part, carry):
            sums, first = carry
            end = at.tiles_to(part)
            return added(sums, self._sums(step, first, end, dtype)), end

        low, high = at.parts
        return lax.fori_loop(low, high, add, (self._none(), jnp.int32(0)))[0]

    def _sums(self, step, first, end, dtype) -> Sums:
        """Over the tiles of an item from `first` to before `end`. dtype: of the queries."""
        plan = self.plan
        accs, m, _ = self._none()
        total = filled((TILE, plan.columns), 0.0, plgpu.Layout.WGMMA)
        running = _Running(accs, m, total, total if plan.source.has_scales else None)
        accs, m, total, zeros = lax.fori_loop(first, end, step, running)
        if zeros is not None:
            zeros = zeros.sum(axis=0)
            boost = plan.source.boost(dtype)
            accs = tuple(without_zeros(acc, zeros, boost, axis=1) for acc in accs)
        return Sums(accs, m, total.sum(axis=0))

    def _none(self) -> Sums:
        return no_sums([width for _, width in pieces(self.plan.value_dim)], self.plan.columns)

    def _store_result(self, at: Item, sums: Sums) -> None:
        sink = self.inputs.sinks
        if sink is not None:
            sink = load(sink.at[at.head], layout=BY_HEAD, optimized=False)
        for i, acc in enumerate(sums.accs):
            out = self.outputs.results.at[at.row, at.head, :, pl.ds(i * 64, acc.shape[0])]
            store_transposed(out, normalised(acc, sums.m, sums.total, sink, axis=1))

    def _store_part(self, turn, at: Item, sums: Sums) -> None:
        parts, number = self.outputs.parts, lax.div(self._pair(turn), self.plan.num_kv_heads)
        for i, acc in enumerate(sums.accs):
            store(parts.sums.at[at.head, number, pl.ds(i * 64, acc.shape[0])], acc)
        store(parts.stats.at[at.head, number, 0], sums.m)
        store(parts.stats.at[at.head, number, 1], sums.total)

    def _fetch_queries(self, at: Item, turn):
        slot = lax.rem(turn, jnp.int32(2))
        queries, ready = self.inputs.queries.at[at.row, at.head], self.memory.queries_ready.at[slot]
        plgpu.copy_gmem_to_smem(queries, self.memory.queries.at[slot], ready)

    def _fetch_first(self, at: Item, used, most):
        """Start the copies of an item's first tiles, `most` at most. `used`: the steps before it."""

        def fetch(i, _):
            self._fetch(at, i, self._stage(used + i))

        lax.fori_loop(0, jnp.minimum(at.num_tiles, most), fetch, None)

    def _stage(self, step):
        return stage_of(step, self.plan.num_stages)

    def _fetch(self, at: Item, i, stage, *, keys: bool = True, values: bool = True):
        """Start the copies of tile i."""
        source, start = self.plan.source, at.first + i * TILE

        def block_of(position):
            inside = jnp.clip(position, at.low, at.high - 1)
            return self.inputs.block_table[at.row, lax.div(inside, jnp.int32(source.block_size))]

        # All are looked up before a copy waits for the first.
        rows = range(0, TILE, source.rows(TILE))
        slots = {row: source.slot(block_of, TILE, start, row) for row in rows}
        for which, stages, wanted in ((0, self.memory.keys, keys), (1, self.memory.values, values)):
            if wanted and stages is not None:
                column = 2 * at.head + which
                source.fetch(self.inputs.pool, slots.__getitem__, column, stages, stage)

    def _step(self, at: Item, following: Item, used, queries, query_sums, i, carry: _Running):
        plan, memory, source = self.plan, self.memory, self.plan.source
        stage, start = self._stage(used + i), at.first + i * TILE
        by_key = partial(lax.broadcast_in_dim, shape=carry.total.shape, broadcast_dimensions=[0])
        by_head = partial(lax.broadcast_in_dim, shape=carry.total.shape, broadcast_dimensions=[1])

        def factors(stages: Stages, column, boost=1.0):
            found = source.factors(stages, stage, 0, column, start, (at.low, at.high), boost)
            return tuple(by_key(each) for each in found)

        if plan.num_stages == 1:
            queries = queries.at[pl.ds(pl.multiple_of(hidden_zero(used + i), 8), plan.columns)]
        s = product(self._keys(stage), queries.transpose((1, 0)))
        if query_sums is not None:
            scale, zero = factors(memory.keys, 2 * at.head)
            s = (s - zero * by_head(query_sums)) * scale
        position = start + plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
        s, unit = scores(s, (position >= at.low) & (position < at.high), plan.options)
        m, rescale, p = weights(s, unit, carry.m, axis=0)
        fetches_keys = plan.num_stages == 1 and memory.values is not None
        if fetches_keys:
            # All have read the keys: the maximum was of theirs. With more stages others are on their way.
            self._fetch_later(at, following, i, stage, values=False)
        total, zeros = carry.total * by_head(rescale) + p, carry.zeros
        if memory.values is not None:
            plgpu.barrier_wait(memory.values.ready.at[stage])
        if zeros is not None:
            assert memory.values is not None
            boost = source.boost(queries.dtype)
            scale, zero = factors(memory.values, 2 * at.head + 1, boost)
            p = p * scale
            zeros = zeros * by_head(rescale) + p * zero
        memory.weights.transpose((1, 0))[...] = p.astype(queries.dtype)
        v = self._values(at, stage, start)
        plgpu.commit_smem()
        accs = tuple(
            self._added(acc * lax.broadcast_in_dim(rescale, acc.shape, [1]), v.at[:, pl.ds(*piece)])
            for acc, piece in zip(carry.accs, pieces(plan.value_dim), strict=True)
        )
        self._fetch_later(at, following, i, stage, keys=not fetches_keys)
        return _Running(accs, m, total, zeros)

    def _fetch_later(self, at: Item, following: Item, i, stage, **which: bool) -> None:
        """Start the copies for the step that has step i's stage next."""
        later = i + self.plan.num_stages
        is_mine = later < at.num_tiles
        item = Item(*(jnp.where(is_mine, *each) for each in zip(at, following, strict=True)))
        tile = jnp.where(is_mine, later, later - at.num_tiles)
        pl.when(tile < item.num_tiles)(lambda: self._fetch(item, tile, stage, **which))

    def _added(self, acc, v):
        """acc + V' P'."""
        v, weights_smem = v.transpose((1, 0)), self.memory.weights.transpose((1, 0))
        if not self.plan.adds_in_place:
            return acc + product(v, weights_smem)
        return added_product(acc, v, weights_smem, interpret=self.plan.options.interpret)

    def _keys(self, stage) -> Ref:
        """[TILE, D] as wgmma reads them."""
        source, memory = self.plan.source, self.memory
        plgpu.barrier_wait(memory.keys.ready.at[stage])
        if source.format is None:
            return memory.keys.data.at[stage]
        source.widen(memory.keys, stage, memory.wide, 0, None)
        plgpu.commit_smem()
        return memory.wide

    def _values(self, at: Item, stage, start) -> Ref:
        """Likewise, when they have arrived; zeros for what is no key and might be NaN. The caller commits."""
        plan, source, memory = self.plan, self.plan.source, self.memory
        if source.format is not None:
            assert memory.values is not None
            source.widen(memory.values, stage, memory.wide, start, (at.low, at.high))
            return memory.wide
        smem = (memory.values or memory.keys).data.at[stage]
        if plan.value_dim < plan.head_dim:
            smem = smem.at[:, pl.ds(0, plan.value_dim)]
        pl.when((start < at.low) | (start + TILE > at.high))(
            lambda: clear_outside(smem, start, at.low, at.high)
        )
        return smem
