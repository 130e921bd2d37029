"""Ragged paged attention on TPUs (Mosaic): one kernel writes the new keys and values, then attends.

It knows one layer's pool as `tpu_layout.py` describes it, and where a step's tokens lie. Not models, meshes or buckets.

Two phases, one after the other, since a row may hit blocks that another row of the same call writes:
- Write: a row's new tokens fill a run of slots. A DMA moves whole registers, so chunks of as many slots are fetched,
  merged and put back, several at a time.
- Attend: a *unit* is a tile of packed queries and a row with tokens in it. Its keys come in tiles of `tile_kv`, the
  next on its way while one is computed, over the border of two units too. Tiles begin at multiples of `tile_kv`
  whatever the batch is, and so does the order of every sum: a row's result depends on nothing but the row.
  (Online softmax: Milakov and Gimelshein, arXiv:1805.02867.)

Letters: T packed query tokens, R rows, M blocks per row, N blocks, S block size, H query heads, K KV heads, D head dim,
G = H / K, Q query tiles, A rows of a query tile of one KV head, P planes (2 with int4, whose bytes hold two values),
W lanes that are read of a head's K or V, B = tile_kv.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.quantized import FLOATS, QuantizedPool
from pallas_kernels.paged_attention import tpu_layout as layout
from pallas_kernels.paged_attention.tpu_layout import LANES, Pool, Shape

MASK = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: no difference of two scores is NaN
KV_BUFFERS = 2
CHUNK_BUFFERS = 8
VMEM_BYTES = 32 << 20  # of 64 MB and more


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pool: Pool,
    block_table: Int[Array, "R M"],
    kv_lens: Int[Array, " R"],
    query_starts: Int[Array, " R+1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    one_query_per_row: bool = False,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "T H D"], Pool]:
    """`kv_write.xla.write_kv`, then `reference.paged_attention`; returns the result and the pool, which stays in place.

    A row's new tokens are the last of its positions, and the block table says where they go: slot_mapping follows from
    it. A row with kv_lens 0 writes and reads nothing, whatever its tokens. The result of tokens of no row is 0.
    T = R and query r is row r's if `one_query_per_row`. Raises NotImplementedError with the reason of
    `tpu_layout.why_not`.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if reason := layout.why_not(q.dtype, pool, num_kv_heads, head_dim, block_table.shape):
        raise NotImplementedError(reason)
    shape = Shape(
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        block_size=pool.shape[1],
        blocks_per_row=block_table.shape[1],
        tile_q=1 if one_query_per_row else layout.tile_q(num_heads // num_kv_heads, num_kv_heads),
        dtype=q.dtype,
        pool_dtype=layout.data(pool).dtype,
        format=pool.format if isinstance(pool, QuantizedPool) else None,
        mask=(scale, window, soft_cap),
    )
    query_lens = jnp.where(kv_lens > 0, query_starts[1:] - query_starts[:-1], 0)
    scalars = [layout.pack_table(block_table), kv_lens, query_starts]
    scalars += layout.work(shape, kv_lens, query_starts, query_lens, num_tokens)
    new = layout.new_rows(shape, k, v, pool)
    out, pool = _call(shape, scalars, layout.to_tiles(shape, q), new, pool, sinks, interpret)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    first = query_starts[None, :-1]
    in_row = ((token >= first) & (token < first + query_lens[None])).any(axis=1)
    return jnp.where(in_row[:, None, None], layout.from_tiles(shape, out, num_tokens), 0), pool


class _Scratch(NamedTuple):
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
    scale_zero: Any = None  # [buffers, blocks, 4 * K, S]
    factors: Any = None  # float32[K, 4, B]: scale and zero of K, of V


def _scratch_shapes(shape: Shape, pool: Pool) -> _Scratch:
    num_blocks = shape.tile_kv // shape.block_size
    heads, tile = shape.num_kv_heads, (shape.num_planes, shape.rows, shape.read_lanes)
    column = pltpu.VMEM((heads, shape.rows, LANES), jnp.float32)
    scratch = _Scratch(
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
            (KV_BUFFERS, num_blocks, 4 * heads, shape.block_size), pool.scale_zero.dtype
        ),
        factors=pltpu.VMEM((heads, 4, shape.tile_kv), jnp.float32),
    )


def _call(shape, scalars, q, new, pool, sinks, interpret):
    """The kernel. q: `to_tiles`; new: `new_rows`. Returns what `from_tiles` takes, and the pool."""
    pools, structure = jax.tree.flatten(pool)
    anywhere, num_pools = pl.BlockSpec(memory_space=pl.ANY), len(pools)
    inputs, in_specs = [q, *new, *pools], [anywhere] * (1 + 2 * num_pools)
    if sinks is not None:
        per_row = sinks.astype(jnp.float32).reshape(shape.num_kv_heads, shape.group)
        per_row = jnp.repeat(per_row, shape.tile_q, axis=1)
        per_row = jnp.pad(per_row, ((0, 0), (0, shape.rows - per_row.shape[1])))
        inputs.append(per_row[:, :, None])
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    chunks = [
        _chunk_buffers(array, axis, size)
        for axis, (array, size) in enumerate(zip(pools, layout.write_sizes(shape), strict=True))
    ]
    scratch_shapes, scratch_structure = jax.tree.flatten((chunks, _scratch_shapes(shape, pool)))

    def kernel(*refs):
        (table, kv_lens, query_starts, *work), refs = refs[: len(scalars)], refs[len(scalars) :]
        (q_ref, *rest), refs = refs[: len(inputs)], refs[len(inputs) :]
        out_ref, pool_refs, scratch = refs[0], refs[1 : 1 + num_pools], refs[1 + num_pools :]
        chunks, scratch = jax.tree.unflatten(scratch_structure, scratch)
        rows = _Rows(shape, table, kv_lens, query_starts)
        for axis in range(num_pools):
            _write(rows, work[:3], rest[axis], pool_refs[axis], chunks[axis], axis)
            work = work[3:]
        sinks_ref = None if sinks is None else rest[-1]
        _attend(rows, work, q_ref, pool_refs, out_ref, sinks_ref, scratch)

    out, *pools = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=in_specs,
            out_specs=[anywhere] * (1 + num_pools),
            scratch_shapes=scratch_shapes,
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            # Not said, XLA may bring a small pool, or its scales, to VMEM as a whole and back again, in each layer.
            *(pltpu.HBM(x.shape, x.dtype) for x in pools),
        ],
        input_output_aliases={len(scalars) + 1 + num_pools + i: 1 + i for i in range(num_pools)},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, *inputs)
    return out, jax.tree.unflatten(structure, pools)


@dataclass(frozen=True)
class _Rows:
    """What the scalar memory holds of the rows."""

    shape: Shape
    table: jax.Array  # int32[R * ceil(M / 2)], see `pack_table`
    kv_lens: jax.Array  # int32[R]
    query_starts: jax.Array  # int32[R+1]

    def block(self, row, number):
        """The row's block of that number."""
        words_per_row = (self.shape.blocks_per_row + 1) // 2
        word = self.table[row * words_per_row + number // 2]
        return (word >> (number % 2 * 16)) & 0xFFFF

    def queries(self, row):
        """The row's packed tokens [first, end), and what a token's position is greater than its index by."""
        first, end = self.query_starts[row], self.query_starts[row + 1]
        return first, end, self.kv_lens[row] - end


def _chunk_buffers(array: jax.Array, axis: int, size: int) -> list:
    """For new slots: `size` of them that lie across the borders of registers; for old ones; and semaphores."""
    new, old = [2 * size, array.shape[2]], [size, array.shape[2]]
    if axis == 1:
        new, old = [array.shape[1], 2 * size], [array.shape[1], size]
    sems = pltpu.SemaphoreType.DMA((CHUNK_BUFFERS,))
    return [
        pltpu.VMEM((CHUNK_BUFFERS, *new), array.dtype),
        pltpu.VMEM((CHUNK_BUFFERS, *old), array.dtype),
        sems,
        sems,
    ]


def _write(rows: _Rows, work, new_ref, pool_ref, buffers, axis: int):
    """Phase 1, for data (slots on axis 0) or scales and zeros (slots on axis 1, a block at a time).

    Turn i merges chunk i while later ones come and earlier ones go. A row owns the blocks that it writes, so no chunk
    is another's.
    """
    chunk_rows, chunk_positions, num_chunks = work
    new_buffers, old_buffers, new_sems, old_sems = buffers
    size, block_size = old_buffers.shape[1 + axis], rows.shape.block_size
    ahead, total = CHUNK_BUFFERS // 2, num_chunks[0]

    def place(index):
        row, position = chunk_rows[index], chunk_positions[index]
        block = pool_ref.at[rows.block(row, position // block_size)]
        return block if axis else block.at[pl.ds(pl.multiple_of(position % block_size, size), size)]

    def first_token(index):
        """Where the chunk's first slot would come from, among the padded new tokens."""
        _, _, before = rows.queries(chunk_rows[index])
        return size + chunk_positions[index] - before

    def fetch_new(index):
        first = pl.multiple_of(first_token(index) // size * size, size)
        source = new_ref.at[(slice(None),) * axis + (pl.ds(first, 2 * size),)]
        slot = index % CHUNK_BUFFERS
        return pltpu.make_async_copy(source, new_buffers.at[slot], new_sems.at[slot])

    def fetch_old(index):
        slot = index % CHUNK_BUFFERS
        return pltpu.make_async_copy(place(index), old_buffers.at[slot], old_sems.at[slot])

    def put(index):
        slot = index % CHUNK_BUFFERS
        return pltpu.make_async_copy(old_buffers.at[slot], place(index), old_sems.at[slot])

    def start(index):
        fetch_new(index).start()
        fetch_old(index).start()

    def merge(index):
        row, slot = chunk_rows[index], index % CHUNK_BUFFERS
        first, end, before = rows.queries(row)
        new, old = _wide(new_buffers[slot]), _wide(old_buffers[slot])
        back = (2 * size - first_token(index) % size) % (2 * size)
        new = pltpu.roll(new, back, axis)
        new = new[:, :size] if axis else new[:size]
        position = chunk_positions[index] + lax.broadcasted_iota(jnp.int32, new.shape, axis)
        is_new = (position >= first + before) & (position < end + before)
        old_buffers[slot] = jnp.where(is_new, new, old).astype(old_buffers.dtype)

    def turn(index, _):
        pl.when(index >= ahead)(lambda: put(index - ahead).wait())
        pl.when(index + ahead < total)(lambda: start(index + ahead))
        fetch_new(index).wait()
        fetch_old(index).wait()
        merge(index)
        put(index).start()
        return 0

    _repeat(0, jnp.minimum(ahead, total), start)
    lax.fori_loop(0, total, turn, 0)
    _repeat(jnp.maximum(total - ahead, 0), total, lambda index: put(index).wait())


def _wide(x: jax.Array) -> jax.Array:
    """In 4 bytes, which registers rotate."""
    return x.astype(jnp.int32 if x.dtype == jnp.uint8 else jnp.float32)


def _repeat(first, end, act: Callable) -> None:
    """Calls act(i) for i in [first, end)."""

    def one(index, _):
        act(index)
        return 0

    lax.fori_loop(first, end, one, 0)


@dataclass(frozen=True)
class _Units:
    """The units of the second phase, in the scalar memory, and what each reads."""

    rows: _Rows
    row: jax.Array  # int32[..]
    query_tile: jax.Array  # int32[..]
    visit: (
        jax.Array
    )  # int32[..] how many query tiles come before that one, which says what its buffer is
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


def _attend(rows: _Rows, work, q_ref, pool_refs, out_ref, sinks_ref, scratch: _Scratch):
    """Phase 2. A turn is one tile of keys of one unit."""
    shape = rows.shape
    row, query_tile, visit, total = work
    units = _Units(rows, row, query_tile, visit, total[0])
    tile_blocks = shape.tile_kv // shape.block_size
    buffers = [scratch.kv, scratch.scale_zero][: len(pool_refs)]

    def query_copy(unit):
        slot = units.visit[unit] % KV_BUFFERS
        source = q_ref.at[units.query_tile[unit]]
        return pltpu.make_async_copy(source, scratch.queries.at[slot], scratch.query_sems.at[slot])

    def out_copy(visit, query_tile):
        slot = visit % 2
        destination = out_ref.at[query_tile]
        return pltpu.make_async_copy(scratch.out.at[slot], destination, scratch.out_sems.at[slot])

    def for_kv_copies(unit, tile, slot, act: Callable):
        """Calls act on the copy of each block with keys of the unit, data and scales."""
        first, end = units.keys_of_tile(unit, tile)

        def of_block(number):
            block = rows.block(units.row[unit], tile * tile_blocks + number)
            for pool_ref, buffer in zip(pool_refs, buffers, strict=True):
                destination = buffer.at[slot, number]
                act(
                    pltpu.make_async_copy(pool_ref.at[block], destination, scratch.kv_sems.at[slot])
                )

        _repeat(first // shape.block_size, pl.cdiv(end, shape.block_size), of_block)

    def prefetch(unit, tile, turn):
        @pl.when(unit < units.total)
        def _():
            is_first = (tile == units.first_tile(unit)) & units.begins_visit(unit)
            pl.when(is_first)(lambda: query_copy(unit).start())
            for_kv_copies(unit, tile, turn % KV_BUFFERS, lambda copy: copy.start())

    def begin_unit(unit):
        @pl.when(units.begins_visit(unit))
        def _():
            query_copy(unit).wait()
            visit = units.visit[unit]
            # Of two visits ago; waiting needs no more than the size.
            pl.when(visit >= 2)(lambda: out_copy(visit, 0).wait())
            scratch.out[visit % 2] = jnp.zeros(scratch.out.shape[1:], scratch.out.dtype)

        scratch.top[...] = jnp.full(scratch.top.shape, MASK, jnp.float32)
        scratch.total[...] = jnp.zeros(scratch.total.shape, jnp.float32)
        scratch.acc[...] = jnp.zeros(scratch.acc.shape, jnp.float32)

    def end_unit(unit):
        first, end = rows.queries(units.row[unit])[:2]
        token = _tokens(shape, units.query_tile[unit])
        mine = (token >= first) & (token < end)
        visit = units.visit[unit]
        _finish(shape, mine, sinks_ref, scratch, scratch.out.at[visit % 2])

        @pl.when(units.ends_visit(unit))
        def _():
            out_copy(visit, units.query_tile[unit]).start()

    def turn(carry):
        number, unit, tile, later_unit, later_tile = carry
        slot = number % KV_BUFFERS
        prefetch(later_unit, later_tile, number + KV_BUFFERS - 1)
        pl.when(tile == units.first_tile(unit))(lambda: begin_unit(unit))
        for_kv_copies(unit, tile, slot, lambda copy: copy.wait())
        _clear_others(shape, scratch, slot, *units.keys_of_tile(unit, tile))
        position = _tokens(shape, units.query_tile[unit]) + rows.queries(units.row[unit])[2]
        query_slot = units.visit[unit] % KV_BUFFERS
        _add_tile(shape, scratch, scratch.queries.at[query_slot], slot, position, tile)
        pl.when(units.is_last_tile(unit, tile))(lambda: end_unit(unit))
        return number + 1, *units.following(unit, tile), *units.following(later_unit, later_tile)

    first = (jnp.int32(0), units.first_tile(0))
    later = first
    for number in range(KV_BUFFERS - 1):
        prefetch(*later, number)
        later = units.following(*later)
    lax.while_loop(lambda carry: carry[1] < units.total, turn, (jnp.int32(0), *first, *later))
    num_visits = jnp.where(units.total > 0, units.visit[jnp.maximum(units.total - 1, 0)] + 1, 0)
    _repeat(jnp.maximum(num_visits - 2, 0), num_visits, lambda visit: out_copy(visit, 0).wait())


def _tokens(shape: Shape, query_tile) -> jax.Array:
    """int32[A, 1]: the packed token of each row of a query tile."""
    row = lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0)
    return query_tile * shape.tile_q + (row & (shape.tile_q - 1))


def _clear_others(shape: Shape, scratch: _Scratch, slot, first, end):
    """Zeros for what is none of the tile's keys [first, end): a weight of 0 times what lies there may be NaN.

    Blocks that were not fetched hold another row's keys, which must not matter even if they are no numbers. Factors are
    widened on the way.
    """
    kv, block_size = scratch.kv, shape.block_size
    empty = jnp.zeros(kv.shape[2:], kv.dtype)

    def clear(number):
        kv[slot, number] = empty

    def keep(number):
        values = _wide(kv[slot, number])
        row = number * block_size + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        kept = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
        kv[slot, number] = kept.astype(kv.dtype)

    first_block, end_block = first // block_size, pl.cdiv(end, block_size)
    _repeat(0, first_block, clear)
    _repeat(end_block, kv.shape[1], clear)
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
            scratch.factors[head, :, lanes] = values[4 * head : 4 * head + 4]


def _add_tile(shape: Shape, scratch: _Scratch, queries, slot, position, tile):
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
        _repeat(0, num_periods, one_period)


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


def _add_head(shape: Shape, scratch: _Scratch, queries, where, kv):
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


def _finish(shape: Shape, mine, sinks_ref, scratch: _Scratch, out_ref):
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

    _repeat(0, shape.num_kv_heads, one_head)
