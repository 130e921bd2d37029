"""Ragged paged attention for Hopper GPUs (sm_90a) in Mosaic GPU. Knows nothing of engines, and chooses nothing.

Two kernels share the contract of `reference.paged_attention`, and a third sums up:

- **Rows with one query** (`_decode`) are bound by the pool's bytes. A row's keys are cut at multiples of `SPLIT`,
  whatever shares the batch, so its result never depends on the batch; `_combine` adds the parts in their order. Where
  all parts would take more than `PARTS_BYTES`, some rows come after others. A grid of as many programs as the chip
  holds walks a list of (row, split, KV head). The *keys* are the 64 rows of wgmma and the G query heads of a KV head
  its columns: S' = K Q', O' = V' P'. So G pads to 8, not to 64, and accumulators are a few registers. To keep an
  H200's memory busy 4.8 TB/s x 1 us / 132 = 36 KB must be on their way to each SM; at D = 128 three programs an SM
  with two stages of 64 keys (32 KB) have 96 to 192 KB.
- **Rows with more queries** (`_prefill`) are bound by the tensor cores. 128 rows of wgmma are 128 / G queries times G
  heads, so that a KV head's keys are read once for its group. Two warpgroups compute on 64 rows each, a third copies.
  Only tiles on the diagonal or on the window's edge are masked.

Blocks come by TMA straight from the pool, found through the block table. What is no key of the row (slots beyond its
length, blocks that a tile has no use for) is masked out of the scores and overwritten by zeros in V, since 0 x NaN is
NaN. Scores are kept in units of log2, and their maximum begins at a finite number, so that no infinity is subtracted
from another. (Online softmax: Milakov and Gimelshein, arXiv:1805.02867. Split keys: Dao et al., Flash-Decoding.)
Quantised blocks are copied as they are; a program dequantises a tile in registers and leaves it for wgmma in
shared memory.

The interpreter of jax 0.11.2 has neither wgmma with its left operand in registers nor accumulators that begin at a
value; under `interpret` the probabilities of `_prefill` go through shared memory and products are added. All else,
every copy, barrier and mask, is the same.

Letters: T packed query tokens, R rows, M blocks per row, N blocks, S block size, H query heads, K KV heads, D head dim,
G = H / K query heads per KV head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.quantized import FLOATS, QuantizedPool
from pallas_kernels.kv_write.xla import Pool
from pallas_kernels.paged_attention import gpu_layout
from pallas_kernels.paged_attention.gpu_layout import ROWS, Sizes

TILE_DECODE = 64  # keys: the rows of one wgmma
MASKED = -1e30  # where the running maximum begins
LOG2E = math.log2(math.e)
DEFAULT = Sizes()


def paged_attention(
    q: Float[Array, "T H D"],
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
    sizes: Sizes = DEFAULT,
    interpret: Any = None,
) -> Float[Array, "T H D"]:
    """Same contract as `reference.paged_attention`. T = R and query r is row r's if `one_query_per_row`.

    q and the pool are both bfloat16 or both float16, or the pool is quantised: its keys and values are rounded to q's
    dtype where wgmma reads them. Products are summed in float32. `sinks` are logits that take part in the softmax of
    each head and have no value. `sizes` are the device's, the same in all calls of an engine. Raises
    NotImplementedError with the reason of `gpu_layout.why_not`. `interpret` takes `plgpu.InterpretGPUParams`
    (jax >= 0.11.2), None compiles.
    """
    if reason := gpu_layout.why_not(q, pool):
        raise NotImplementedError(reason)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32) * LOG2E
    options = _Options(scale, window, soft_cap, sinks, sizes, interpret)
    if one_query_per_row:
        return _decode(q, pool, block_table, kv_lens, options)

    out = _prefill(q, pool, block_table, kv_lens, query_starts, options)
    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    single, rows = query_starts[1:] - query_starts[:-1] == 1, jnp.arange(num_rows)
    if num_tokens < num_rows:  # no more than so many rows have a query
        (rows,) = jnp.nonzero(single, size=num_tokens, fill_value=num_rows)
    lens = jnp.where(single, kv_lens, 0).at[rows].get(mode="fill", fill_value=0)
    first = jnp.where(single, query_starts[:-1], num_tokens)
    first = first.at[rows].get(mode="fill", fill_value=num_tokens)
    queries, table = (x.at[i].get(mode="clip") for x, i in ((q, first), (block_table, rows)))
    return out.at[first].set(_decode(queries, pool, table, lens, options), mode="drop")


@dataclass(frozen=True)
class _Options:
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None  # float32[H], in units of log2
    sizes: Sizes
    interpret: Any


def _tiled(*shape: int, dtype, swizzle: int):
    """Shared memory as wgmma reads it: swizzled tiles of 8 rows, whose length is `swizzle` bytes."""
    tiles = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(swizzle)))


def _load(ref, *, layout, optimized: bool = True):
    """Shared memory, or with `optimized=False` any memory, into registers."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue] (jax 0.10)


def _filled(shape: tuple[int, ...], value: float, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _swizzle(row_bytes: int) -> int:
    return next(swizzle for swizzle in (128, 64, 32) if row_bytes % swizzle == 0)


def _scores(s, visible, options: _Options):
    """Raw products → scores in units of log2; -inf where not `visible` (None: all are)."""
    scale, cap = options.scale, options.soft_cap
    if cap is None:
        s = s * (scale * LOG2E)
    else:  # tanh by way of exp2: the hardware's tanh is good to 11 bits only
        e = jnp.exp2(s * (2 * LOG2E * scale / cap))
        s = (cap * LOG2E) * (1.0 - 2.0 / (1.0 + e))
    return s if visible is None else jnp.where(visible, s, -jnp.inf)


def _weights(s, m, axis: int):
    """The new maximum over the keys, which lie along `axis`, what old sums shrink by, and exp(s - maximum)."""
    m_new = jnp.maximum(m, s.max(axis=axis))
    return (
        m_new,
        jnp.exp2(m - m_new),
        jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [1 - axis])),
    )


def _normalised(acc, m, total, sinks, axis: int):
    """acc / total, which includes the logits of sinks; zeros where nothing was visible. m lies along `axis` of acc."""
    for sink in sinks:
        top = jnp.maximum(m, sink)
        rescale = jnp.exp2(m - top)
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [axis])
        total = total * rescale + jnp.exp2(sink - top)
    total = jnp.where(total > 0.0, total, 1.0)
    return acc / lax.broadcast_in_dim(total, acc.shape, [axis])


@dataclass(frozen=True)
class _Source:
    """A pool as the kernels read it: a row of `arrays` for each slot, the columns of K and V of a head side by side."""

    arrays: tuple[
        jax.Array, ...
    ]  # [N * S, 2 * K * width], and scales and zeros [N * S, 4 * K] of int8 and int4
    format: str | None
    block_size: int
    width: int  # columns of a head's K: D, or D / 2 bytes of int4

    @classmethod
    def of(cls, pool: Pool) -> _Source:
        num_blocks, block_size, heads, width = pool.shape
        slots = num_blocks * block_size
        if not isinstance(pool, QuantizedPool):
            return cls((pool.reshape(slots, -1),), None, block_size, width)
        data, scale_zero = pool.data.reshape(slots, -1), pool.scale_zero
        if pool.format in FLOATS:
            data = lax.bitcast_convert_type(data, FLOATS[pool.format])
        if scale_zero is None:
            return cls((data,), pool.format, block_size, width)
        if scale_zero.dtype == jnp.uint16:
            scale_zero = lax.bitcast_convert_type(scale_zero, jnp.bfloat16)
        return cls((data, scale_zero.reshape(slots, 2 * heads)), pool.format, block_size, width)

    def memory(self, num_stages: int, tile: int) -> tuple:
        """Stages of K or of V, and the barrier that says which have come."""
        dtype = self.arrays[0].dtype
        swizzle = _swizzle(self.width * dtype.itemsize)
        stages = [_tiled(num_stages, tile, self.width, dtype=dtype, swizzle=swizzle)]
        if len(self.arrays) > 1:
            stages.append(plgpu.SMEM((num_stages, tile, 8), self.arrays[1].dtype))
        arrivals = len(stages) * (tile // min(self.block_size, tile))
        return stages, plgpu.Barrier(num_arrivals=arrivals, num_barriers=num_stages)

    def bytes_per_key(self) -> int:
        """Of shared memory, for K or V in one stage."""
        data, *scale_zero = (x.dtype.itemsize for x in self.arrays)
        return self.width * data + 8 * sum(scale_zero)

    def rows(self, tile: int) -> int:
        """Of a tile that lie together in the pool."""
        return min(self.block_size, tile)

    def slot(self, block_of, tile: int, start, row: int):
        """Where those begin that hold position `start + row` and what follows."""
        slot = lax.rem(start + row, jnp.int32(self.block_size))
        return pl.multiple_of(block_of(start + row) * self.block_size + slot, self.rows(tile))

    def fetch(self, refs, slot_of, column, stages, stage, ready):
        """Copy a tile whose row i stands in slot `slot_of(i)`. `column`: 2 * head for K, 2 * head + 1 for V."""
        tile = stages[0].shape[1]
        rows = self.rows(tile)
        columns = [pl.ds(pl.multiple_of(column * self.width, self.width), self.width)]
        # Scales and zeros of two heads are the 16 bytes that TMA copies at least.
        columns.append(pl.ds(pl.multiple_of(lax.div(column, jnp.int32(4)) * 8, 8), 8))
        for row in range(0, tile, rows):
            slot = slot_of(row)
            for ref, smem, of_head in zip(refs, stages, columns, strict=False):
                into = smem.at[stage, pl.ds(row, rows)]
                plgpu.copy_gmem_to_smem(ref.at[pl.ds(slot, rows), of_head], into, ready.at[stage])

    def widen(self, stages, stage, column, into, start, inside):
        """Dequantise a stage into `into` [tile, D]; zeros where its positions, from `start` on, are not `inside`.

        `inside` is a pair of bounds, or None for keys, whose scores are masked.
        """
        rows, columns = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA_UPCAST_2X
        step = _swizzle(self.width)  # columns are bytes
        for row in range(0, into.shape[0], 64):
            some = pl.ds(row, 64)
            scale, zero, kept = None, None, None
            if inside is not None:
                position = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=rows) + (start + row)
                kept = (position >= inside[0]) & (position < inside[1])
            if len(stages) > 1:
                scale, zero = _scale_zero(stages[1].at[stage, some], column)
                if kept is not None:
                    scale, zero = jnp.where(kept, scale, 0.0), jnp.where(kept, zero, 0.0)
            for first in range(0, self.width, step):
                x = _load(stages[0].at[stage, some, pl.ds(first, step)], layout=columns)
                parts = [x]
                if self.format == "int4":
                    x = x.astype(jnp.int32)
                    parts = [(x & 15).astype(jnp.float32), (x >> 4).astype(jnp.float32)]
                for i, x in enumerate(parts):
                    # Exact in 16 bits, and only those change their layout at no great cost.
                    x = x.astype(jnp.float16 if self.format in FLOATS else jnp.bfloat16)
                    x = plgpu.layout_cast(x, plgpu.Layout.WGMMA).astype(jnp.float32)
                    if scale is not None and zero is not None:
                        x = x - lax.broadcast_in_dim(zero, x.shape, [0])
                        x = x * lax.broadcast_in_dim(scale, x.shape, [0])
                    elif kept is not None:
                        x = jnp.where(lax.broadcast_in_dim(kept, x.shape, [0]), x, 0.0)
                    to = pl.ds(i * self.width + first, step)
                    into[some, to] = x.astype(into.dtype)


def _scale_zero(smem, column):
    """Each [64]: those of one head's K or V, from [64, 8] of two heads. wgmma's layout has sums, but no columns."""
    table = _load(smem, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    at = plgpu.broadcasted_iota(jnp.int32, table.shape, 1, layout=plgpu.Layout.WGMMA)
    first = lax.rem(column, jnp.int32(4)) * 2
    return tuple(jnp.where(at == first + i, table, 0.0).sum(axis=1) for i in (0, 1))


def _clear_outside(v_smem, start, low, high):
    """Zeros in the rows of a tile of V, whose first is position `start`, that are not in [low, high)."""
    v = _load(v_smem, layout=plgpu.Layout.WGMMA)
    position = start + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
    inside = (position >= low) & (position < high)
    v_smem[...] = jnp.where(inside, v, jnp.zeros_like(v))


def _decode(q, pool, block_table, kv_lens, options: _Options):
    """One query a row: q [R, H, D], row r's at position `kv_lens[r] - 1` → [R, H, D]; zeros for rows of length 0."""
    num_rows, num_heads, _ = q.shape
    num_kv_heads, num_keys = pool.shape[2] // 2, block_table.shape[1] * pool.shape[1]
    rows, columns = _part_shape(num_heads // num_kv_heads, q.shape[2])
    of_row = 4 * rows * columns * num_kv_heads * gpu_layout.most_splits(num_keys, options.window)
    at_once = gpu_layout.rows_at_once(num_rows, of_row)
    if at_once == num_rows:
        return _decode_rows(q, pool, block_table, kv_lens, options)

    def turn(some):
        return _decode_rows(some[0], pool, some[1], some[2], options)

    def in_turns(x):
        x = jnp.pad(x, ((0, -num_rows % at_once), *((0, 0) for _ in x.shape[1:])))
        return x.reshape(-1, at_once, *x.shape[1:])

    out = lax.map(turn, (in_turns(q), in_turns(block_table), in_turns(kv_lens)))
    return out.reshape(-1, *q.shape[1:])[:num_rows]


def _pieces(head_dim: int) -> list[tuple[int, int]]:
    """V' is the left operand of wgmma, whose rows are multiples of 64: of 96 columns the first and the last 64."""
    return [(0, head_dim)] if head_dim % 64 == 0 else [(0, 64), (head_dim - 64, 64)]


def _part_shape(group: int, head_dim: int) -> tuple[int, int]:
    """Of a part's sum, O': D, and G as wgmma pads it."""
    return sum(width for _, width in _pieces(head_dim)), pl.cdiv(group, 8) * 8


def _decode_rows(q, pool, block_table, kv_lens, options: _Options):
    num_rows, num_heads, head_dim = q.shape
    source, block_size, num_kv_heads = _Source.of(pool), pool.shape[1], pool.shape[2] // 2
    group = num_heads // num_kv_heads
    pieces, (rows, columns) = _pieces(head_dim), _part_shape(group, head_dim)
    tile, swizzle = TILE_DECODE, _swizzle(head_dim * q.dtype.itemsize)
    stage_bytes = 2 * tile * source.bytes_per_key()
    own_bytes = columns * (head_dim + tile) * q.dtype.itemsize + 4096  # q, p, barriers, reductions
    if source.format is not None:
        own_bytes += tile * head_dim * q.dtype.itemsize
    fitting = gpu_layout.SM_BYTES // (2 * stage_bytes + own_bytes + gpu_layout.RESERVED_BYTES)
    if len(source.arrays) > 1:  # scales and zeros: more registers than a third of an SM's
        fitting = min(fitting, 2)
    per_sm = max(1, min(options.sizes.programs_per_sm, fitting))
    share = gpu_layout.SM_BYTES // per_sm - gpu_layout.RESERVED_BYTES
    num_stages = min((share - own_bytes) // stage_bytes, gpu_layout.SPLIT // tile)
    num_keys = block_table.shape[1] * block_size
    starts, row_of, first_of = gpu_layout.splits(kv_lens, num_keys, options.window)
    max_items = row_of.shape[0]
    num_programs = min(per_sm * gpu_layout.NUM_SMS, max_items * num_kv_heads)
    heads_by_kv = ((0, 0), (0, 0), (0, columns - group), (0, 0))
    queries = jnp.pad(q.reshape(num_rows, num_kv_heads, group, head_dim), heads_by_kv)

    def body(q_ref, table_ref, len_ref, starts_ref, row_ref, first_ref, *rest):
        *pool_refs, part_ref, stats_ref, q_smem, p_smem, wide_smem, q_ready, k, v = rest
        (k_stages, k_ready), (v_stages, v_ready) = k, v
        program = lax.axis_index("program")

        def attend(turn, _):
            index = program + turn * num_programs
            item, head = lax.div(index, jnp.int32(num_kv_heads)), lax.rem(index, num_kv_heads)
            row, low = row_ref[item], first_ref[item]
            kv_len = len_ref[row]
            high = jnp.minimum(low + gpu_layout.SPLIT, kv_len)
            if options.window is not None:
                low = jnp.minimum(jnp.maximum(low, kv_len - options.window), high)
            first = lax.div(low, jnp.int32(tile)) * tile
            num_tiles = lax.div(jnp.maximum(high - first, 0) + (tile - 1), jnp.int32(tile))
            num_tiles = jnp.where(low < high, num_tiles, 0)
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem, q_ready)

            def block_of(position):
                inside = jnp.clip(position, low, high - 1)
                return table_ref[row, lax.div(inside, jnp.int32(block_size))]

            def fetch(i, stage):
                start, rows = first + i * tile, range(0, tile, source.rows(tile))
                # All are looked up before a copy waits for the first.
                slots = {row: source.slot(block_of, tile, start, row) for row in rows}
                for column, (stages, ready) in ((2 * head, k), (2 * head + 1, v)):
                    source.fetch(pool_refs, slots.__getitem__, column, stages, stage, ready)

            for stage in range(num_stages):
                pl.when(stage < num_tiles)(lambda stage=stage: fetch(jnp.int32(stage), stage))
            plgpu.barrier_wait(q_ready)

            def keys(stage):
                plgpu.barrier_wait(k_ready.at[stage])
                if source.format is None:
                    return k_stages[0].at[stage]
                source.widen(k_stages, stage, 2 * head, wide_smem, 0, None)
                plgpu.commit_smem()
                return wide_smem

            def values(stage, start):
                plgpu.barrier_wait(v_ready.at[stage])
                if source.format is not None:
                    source.widen(v_stages, stage, 2 * head + 1, wide_smem, start, (low, high))
                    return wide_smem
                smem = v_stages[0].at[stage]
                pl.when((start < low) | (start + tile > high))(
                    lambda: _clear_outside(smem, start, low, high)
                )
                return smem

            def step(i, carry):
                accs, m, total = carry
                stage, start = lax.rem(i, jnp.int32(num_stages)), first + i * tile
                s = _product(keys(stage), q_smem.transpose((1, 0)))
                position = start + plgpu.broadcasted_iota(
                    jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA
                )
                s = _scores(s, (position >= low) & (position < high), options)
                m_new, rescale, p = _weights(s, m, axis=0)
                p_smem.transpose((1, 0))[...] = p.astype(q.dtype)
                v = values(stage, start)
                plgpu.commit_smem()
                accs = tuple(
                    acc * lax.broadcast_in_dim(rescale, acc.shape, [1])
                    + _product(v.at[:, pl.ds(*piece)].transpose((1, 0)), p_smem.transpose((1, 0)))
                    for acc, piece in zip(accs, pieces, strict=True)
                )
                pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages, stage))
                return accs, m_new, total * lax.broadcast_in_dim(rescale, total.shape, [1]) + p

            by_key, by_head = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
            begin = (
                tuple(_filled((width, columns), 0.0, by_key) for _, width in pieces),
                _filled((columns,), MASKED, by_head),
                _filled((tile, columns), 0.0, by_key),
            )
            accs, m, total = lax.fori_loop(0, num_tiles, step, begin)
            for i, acc in enumerate(accs):
                part_ref.at[head, item, pl.ds(i * 64, acc.shape[0])][...] = acc
            stats_ref.at[head, item, 0][...] = m
            stats_ref.at[head, item, 1][...] = total.sum(axis=0)

        num_turns = pl.cdiv(starts_ref[num_rows] * num_kv_heads - program, num_programs)
        lax.fori_loop(0, num_turns, attend, None)

    parts = jax.ShapeDtypeStruct((num_kv_heads, max_items, rows, columns), jnp.float32)
    # Rows 2 and 3 are not used; TMA copies to multiples of 128 bytes.
    stats = jax.ShapeDtypeStruct((num_kv_heads, max_items, 4, columns), jnp.float32)
    tiled = partial(_tiled, dtype=q.dtype, swizzle=swizzle)
    kernel = plgpu.kernel(
        body,
        out_type=(parts, stats),
        grid=(num_programs,),
        grid_names=("program",),
        scratch_types=(
            tiled(columns, head_dim),
            tiled(columns, tile),
            None if source.format is None else tiled(tile, head_dim),
            plgpu.Barrier(),
            source.memory(num_stages, tile),
            source.memory(num_stages, tile),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=options.interpret,
    )
    lists = block_table, kv_lens, starts, row_of, first_of
    parts, stats = kernel(queries, *lists, *source.arrays)
    out = _combine(parts, stats, starts, q.dtype, options)
    if len(pieces) > 1:  # without what the second has in common with the first
        out = jnp.concatenate([out[..., :64], out[..., 64 - head_dim :]], axis=-1)
    return out[:, :, :group].reshape(q.shape)


def _product(a, b):
    """a @ b in float32, of references in shared memory."""

    def multiply(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _chunk(rows: int, columns: int) -> int:
    """Parts that are on their way to `_combine` at once: up to 64 KB."""
    return max(1, min(16, 65536 // (4 * rows * columns)))


def _combine(parts, stats, starts, dtype, options: _Options):
    """Parts [K, items, D, G] and their maxima and sums [K, items, 4, G], row r's from starts[r] on → [R, K, G, D]."""
    num_kv_heads, _, rows, columns = parts.shape
    num_rows = starts.shape[0] - 1
    chunk, sinks = _chunk(rows, columns), options.sinks
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1)
        sinks = jnp.pad(sinks, ((0, 0), (0, columns - sinks.shape[1])))
    by_head = plgpu.Layout.WGMMA.reduce(0)

    def body(part_ref, stats_ref, starts_ref, *rest):
        *sinks_ref, out_ref, part_smem, stats_smem, ready = rest
        row, head = lax.axis_index("row"), lax.axis_index("head")
        begin, end = starts_ref[row], starts_ref[row + 1]

        def add_chunk(turn, carry):
            item = begin + turn * chunk
            num_parts = jnp.minimum(end - item, chunk)

            def fetch(i, _):
                for ref, smem in ((part_ref, part_smem), (stats_ref, stats_smem)):
                    plgpu.copy_gmem_to_smem(ref.at[head, item + i], smem.at[i], ready.at[i])

            def add(i, carry):
                acc, m, total = carry
                plgpu.barrier_wait(ready.at[i])
                part = _load(part_smem.at[i], layout=plgpu.Layout.WGMMA)
                part_m = _load(stats_smem.at[i, 0], layout=by_head)
                part_total = _load(stats_smem.at[i, 1], layout=by_head)
                m_new = jnp.maximum(m, part_m)
                old, new = jnp.exp2(m - m_new), jnp.exp2(part_m - m_new)
                acc = acc * lax.broadcast_in_dim(old, acc.shape, [1])
                acc = acc + part * lax.broadcast_in_dim(new, acc.shape, [1])
                return acc, m_new, total * old + part_total * new

            plgpu.commit_smem()  # what was read before is copied over
            lax.fori_loop(0, num_parts, fetch, None)
            return lax.fori_loop(0, num_parts, add, carry)

        nothing = (
            _filled((rows, columns), 0.0, plgpu.Layout.WGMMA),
            _filled((columns,), MASKED, by_head),
            _filled((columns,), 0.0, by_head),
        )
        acc, m, total = lax.fori_loop(0, pl.cdiv(end - begin, chunk), add_chunk, nothing)
        sinks = [_load(ref.at[head], layout=by_head, optimized=False) for ref in sinks_ref]
        out = _normalised(acc, m, total, sinks, axis=1).astype(dtype)
        # In the transposed layout a thread's pairs of values lie along D, as they do in memory.
        out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        out_ref.at[row, head].transpose((1, 0))[...] = out

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_kv_heads, columns, rows), dtype),
        grid=(num_kv_heads, num_rows),
        grid_names=("head", "row"),
        scratch_types=(
            plgpu.SMEM((chunk, rows, columns), jnp.float32),
            plgpu.SMEM((chunk, 4, columns), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=chunk),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=options.interpret,
    )
    return kernel(parts, stats, starts, *(() if sinks is None else (sinks,)))


def _prefill(q, pool, block_table, kv_lens, query_starts, options: _Options):
    """All rows but those with one query, whose output is left as it was in memory; zeros for tokens of no row."""
    num_tokens, num_heads, head_dim = q.shape
    source, block_size, num_kv_heads = _Source.of(pool), pool.shape[1], pool.shape[2] // 2
    group = num_heads // num_kv_heads
    # Queries of a tile: row g * tile_q + i of wgmma is head g of query i, and the rows left over go to waste. An even
    # number of queries of a multiple of 64 columns begins at a multiple of 128 bytes, as TMA wants it.
    tile_q, wide = ROWS // group // 2 * 2, pl.cdiv(head_dim, 64) * 64
    q = jnp.pad(q, ((0, max(0, tile_q - num_tokens)), (0, 0), (0, wide - head_dim)))
    padded_tokens, swizzle = q.shape[0], _swizzle(head_dim * q.dtype.itemsize)
    width, window, sinks = swizzle // q.dtype.itemsize, options.window, options.sinks
    tile, num_k, num_v = _tile_and_stages(head_dim, options.sizes)
    items = gpu_layout.query_tiles(query_starts, kv_lens, num_tokens, tile_q)
    if sinks is not None:  # of each row of wgmma
        row = jnp.minimum(jnp.arange(ROWS) // tile_q, group - 1)
        sinks = sinks.reshape(num_kv_heads, group)[:, row]

    def body(q_ref, table_ref, row_ref, token_ref, count_ref, position_ref, *rest):
        pool_refs, rest = rest[: len(source.arrays)], rest[len(source.arrays) :]
        *sinks_ref, out_ref, io_smem, q_smem, p_smem, wide_smem = rest[:-7]
        q_ready, k, v, k_done, v_done, met, written = rest[-7:]
        key_stages, value_stages = (num_k, *k, k_done), (num_v, *v, v_done)
        index, head = lax.axis_index("tile"), lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")
        count = count_ref[index]
        # A tile that would end beyond the last token begins earlier, with queries that are not its own.
        token = jnp.minimum(token_ref[index], padded_tokens - tile_q)
        skipped = token_ref[index] - token
        bottom = position_ref[index]  # of its first own query; negative for padding
        high = jnp.maximum(bottom + count, 0)
        low = jnp.int32(0) if window is None else jnp.maximum(bottom - (window - 1), 0)
        first = lax.div(low, jnp.int32(tile))
        num_tiles = jnp.where(low < high, lax.div(high + (tile - 1), jnp.int32(tile)) - first, 0)

        def copy():
            plgpu.set_max_registers(40, action="decrease")
            row = row_ref[index]
            for g in range(group):
                queries = q_ref.at[pl.ds(token, tile_q), head * group + g]
                into = io_smem.at[pl.ds(g * tile_q, tile_q)]
                plgpu.copy_gmem_to_smem(queries, into, q_ready)

            def block_of(position):
                inside = jnp.clip(position, low, high - 1)
                return table_ref[row, lax.div(inside, jnp.int32(block_size))]

            def fetch(i, _):
                # Not all are looked up at once: there are few registers.
                slot_of = partial(source.slot, block_of, tile, (first + i) * tile)
                for which, of in enumerate((key_stages, value_stages)):
                    num_stages, stages, ready, done = of
                    pl.when(i >= num_stages)(partial(release, i, None, num_stages, done))
                    stage = lax.rem(i, jnp.int32(num_stages))
                    source.fetch(pool_refs, slot_of, 2 * head + which, stages, stage, ready)

            def release(i, _, num_stages, done):
                plgpu.barrier_wait(done.at[lax.rem(i, jnp.int32(num_stages))])

            lax.fori_loop(0, num_tiles, fetch, None)
            # Who waits at a barrier once has to see each of its phases.
            for num_stages, _, _, done in (key_stages, value_stages):
                rest = partial(release, num_stages=num_stages, done=done)
                lax.fori_loop(jnp.maximum(num_tiles - num_stages, 0), num_tiles, rest, None)

        def compute():
            plgpu.set_max_registers(232, action="increase")
            half = pl.ds(pl.multiple_of(warpgroup * 64, 64), 64)
            by_row = plgpu.Layout.WGMMA.reduce(1)
            plgpu.barrier_wait(q_ready)
            for column in range(0, head_dim, width):
                at = half, pl.ds(column, width)
                q_smem[at] = _load(io_smem.at[at], layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.commit_smem()
            row = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=by_row) + warpgroup * 64
            position = (bottom - skipped) + lax.rem(row, jnp.int32(tile_q))

            def meet():
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)

            def widen(i, which, num_stages, stages, ready, done):
                stage, start = lax.rem(i, jnp.int32(num_stages)), (first + i) * tile
                plgpu.barrier_wait(ready.at[stage])
                inside = (low, high) if which else None
                source.widen(stages, stage, 2 * head + which, wide_smem[which], start, inside)
                plgpu.commit_smem()
                plgpu.barrier_arrive(done.at[stage])

            def widen_both(i):  # one warpgroup the keys, the other the values
                for which, of in enumerate((key_stages, value_stages)):
                    pl.when(warpgroup == which)(partial(widen, i, which, *of))
                meet()

            def clear(stage, start):
                @pl.when((start < low) | (start + tile > high))
                def _():
                    @pl.when(warpgroup == 0)
                    def _():
                        for i in range(0, tile, 64):
                            part = v[0][0].at[stage, pl.ds(i, 64)]
                            _clear_outside(part, start + i, low, high)
                        plgpu.commit_smem()

                    meet()

            def step(i, carry, masked):
                acc, m, total = carry
                stage, start = lax.rem(i, jnp.int32(num_k)), (first + i) * tile
                if source.format is None:
                    plgpu.barrier_wait(k[1].at[stage])
                    keys = k[0][0].at[stage]
                else:
                    widen_both(i)
                    keys = wide_smem[0]
                s = _product(q_smem.at[half], keys.transpose((1, 0)))
                if source.format is None:
                    plgpu.barrier_arrive(k_done.at[stage])
                visible = _visible(s.shape, position, start, window) if masked else None
                s = _scores(s, visible, options)
                m_new, rescale, p = _weights(s, m, axis=1)
                total = total * rescale + p.sum(axis=1)
                acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])
                p = p.astype(q.dtype)
                stage = lax.rem(i, jnp.int32(num_v))
                if source.format is None:
                    plgpu.barrier_wait(v[1].at[stage])
                    values = v[0][0].at[stage]
                    if masked:
                        clear(stage, start)
                else:
                    values = wide_smem[1]
                if options.interpret is None:
                    acc = _accumulated(acc, p, values)
                else:
                    p_smem[half] = p
                    plgpu.commit_smem()
                    acc = acc + _product(p_smem.at[half], values)
                if source.format is None:
                    plgpu.barrier_arrive(v_done.at[stage])
                else:
                    meet()  # before another tile is written over this one
                return acc, m_new, total

            carry = (
                _filled((64, head_dim), 0.0, plgpu.Layout.WGMMA),
                _filled((64,), MASKED, by_row),
                _filled((64,), 0.0, by_row),
            )
            edge, whole = _unmasked_tiles(bottom, bottom + count - 1, window, tile)
            edge = jnp.clip(edge - first, 0, num_tiles)
            whole = jnp.clip(whole - first, edge, num_tiles)
            if window is not None:
                carry = lax.fori_loop(0, edge, partial(step, masked=True), carry)
            carry = lax.fori_loop(edge, whole, partial(step, masked=False), carry)
            acc, m, total = lax.fori_loop(whole, num_tiles, partial(step, masked=True), carry)
            sinks = [_load(r.at[head, half], layout=by_row, optimized=False) for r in sinks_ref]
            out = _normalised(acc, m, total, sinks, axis=0).astype(q.dtype)
            for column in range(0, head_dim, width):
                io_smem[half, pl.ds(column, width)] = out[:, column : column + width]
            plgpu.commit_smem()
            plgpu.barrier_arrive(written)

            @pl.when(warpgroup == 0)
            def _():
                plgpu.barrier_wait(written)
                _write_queries(
                    io_smem, out_ref, head * group, group, tile_q, (token, skipped, count)
                )

        @pl.when(count > 0)
        def _():
            pl.when(warpgroup == 2)(copy)
            pl.when(warpgroup < 2)(compute)

    tiled = partial(_tiled, dtype=q.dtype, swizzle=swizzle)
    readers = 2 if source.format is None else 1
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_kv_heads, items[0].shape[0]),
        grid_names=("head", "tile"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((ROWS, wide), q.dtype),
            tiled(ROWS, head_dim),
            None if options.interpret is None else tiled(ROWS, tile),
            None if source.format is None else [tiled(tile, head_dim), tiled(tile, head_dim)],
            plgpu.Barrier(num_arrivals=group),
            source.memory(num_k, tile),
            source.memory(num_v, tile),
            plgpu.Barrier(num_arrivals=readers, num_barriers=num_k),
            plgpu.Barrier(num_arrivals=readers, num_barriers=num_v),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=options.interpret,
    )
    extra = () if sinks is None else (sinks,)
    return kernel(q, block_table, *items, *source.arrays, *extra)[:num_tokens, :, :head_dim]


def _tile_and_stages(head_dim: int, sizes: Sizes) -> tuple[int, int, int]:
    """Keys of a tile, stages of K and of V: what fits into shared memory beside the queries.

    Which are there twice, as copied and as wgmma reads them.
    """
    if head_dim > 128:
        return 64, 2, 2 if head_dim <= 192 else 1
    return sizes.tile_kv, sizes.stages, sizes.stages


def _visible(shape: tuple[int, ...], position, start, window: int | None):
    """Which of the keys from `start` on the queries at `position` [64] may see."""
    key = start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    query = lax.broadcast_in_dim(position, shape, [0])
    return key <= query if window is None else (key <= query) & (key > query - window)


def _unmasked_tiles(bottom, top, window: int | None, tile: int):
    """From which tile on, and up to which, queries at `bottom` to `top` all see every key."""
    whole = lax.div(jnp.maximum(bottom + 1, 0), jnp.int32(tile))
    if window is None:
        return jnp.int32(0), whole
    return lax.div(jnp.maximum(top - window + 1, 0) + (tile - 1), jnp.int32(tile)), whole


def _write_queries(smem, out_ref, first_head, group: int, tile_q: int, tokens):
    """Row g * tile_q + i of `smem` is head g of token i; of those, `count` from `skipped` on are the tile's own."""
    token, skipped, count = tokens

    def write(i, num_queries):
        for g in range(group):
            out = out_ref.at[pl.ds(token + i, num_queries), first_head + g]
            plgpu.copy_smem_to_gmem(smem.at[pl.ds(g * tile_q + i, num_queries)], out)

    pl.when(count == tile_q)(lambda: write(0, tile_q))

    @pl.when(count < tile_q)
    def _():
        lax.fori_loop(skipped, skipped + count, lambda i, _: write(i, 1), None)

    plgpu.wait_smem_to_gmem(0)


def _accumulated(acc, a, b):
    """acc + a @ b in float32, with a in registers and b in shared memory."""

    def multiply(ref):
        plgpu.wgmma(ref, a, b)

    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))
