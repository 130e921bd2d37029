"""Paged attention of rows with one query, for Hopper: bound by the pool's bytes.

Knows how a row's keys are cut into parts and added up again. Letters and principles stand in `gpu.py`.

The *keys* are the 64 rows of wgmma and the G query heads of a KV head its columns: S' = K Q', O' = V' P'. So G pads to
8, not to 64, and accumulators are a few registers. To keep an H200's memory busy 4.8 TB/s x 1 us / 132 = 36 KB must be
on their way to each SM; at D = 128 three programs an SM with two stages of 64 keys (32 KB) have 96 to 192 KB. All parts
together take at most `gpu_layout.PARTS_BYTES`: where rows have more, some come after others. (Split keys: Dao et al.,
Flash-Decoding.)
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.paged_attention import gpu_layout
from pallas_kernels.paged_attention.gpu_tiles import (
    MASKED,
    Options,
    Source,
    clear_outside,
    filled,
    normalised,
    scores,
    swizzle_of,
    weights,
)
from pallas_kernels.wgmma import load, product, store, tiled

TILE = 64  # keys: the rows of one wgmma


def decode(q, pool, block_table, kv_lens, options: Options):
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


def _decode_rows(q, pool, block_table, kv_lens, options: Options):
    num_rows, num_heads, head_dim = q.shape
    source, block_size, num_kv_heads = Source.of(pool), pool.shape[1], pool.shape[2] // 2
    group = num_heads // num_kv_heads
    pieces, (rows, columns) = _pieces(head_dim), _part_shape(group, head_dim)
    tile, swizzle = TILE, swizzle_of(head_dim * q.dtype.itemsize)
    per_sm, num_stages = _programs_and_stages(source, columns, q, options)
    num_keys = block_table.shape[1] * block_size
    starts, row_of, first_of = gpu_layout.splits(kv_lens, num_keys, options.window)
    max_items = row_of.shape[0]
    num_programs = min(per_sm * hopper.NUM_SMS, max_items * num_kv_heads)
    heads_by_kv = ((0, 0), (0, 0), (0, columns - group), (0, 0))
    queries = jnp.pad(q.reshape(num_rows, num_kv_heads, group, head_dim), heads_by_kv)

    def paged_decode(q_ref, table_ref, len_ref, starts_ref, row_ref, first_ref, *rest):
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
                    lambda: clear_outside(smem, start, low, high)
                )
                return smem

            def step(i, carry):
                accs, m, total = carry
                stage, start = lax.rem(i, jnp.int32(num_stages)), first + i * tile
                s = product(keys(stage), q_smem.transpose((1, 0)))
                position = start + plgpu.broadcasted_iota(
                    jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA
                )
                s, unit = scores(s, (position >= low) & (position < high), options)
                m_new, rescale, p = weights(s, unit, m, axis=0)
                p_smem.transpose((1, 0))[...] = p.astype(q.dtype)
                v = values(stage, start)
                plgpu.commit_smem()
                accs = tuple(
                    acc * lax.broadcast_in_dim(rescale, acc.shape, [1])
                    + product(v.at[:, pl.ds(*piece)].transpose((1, 0)), p_smem.transpose((1, 0)))
                    for acc, piece in zip(accs, pieces, strict=True)
                )
                pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages, stage))
                return accs, m_new, total * lax.broadcast_in_dim(rescale, total.shape, [1]) + p

            by_key, by_head = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
            begin = (
                tuple(filled((width, columns), 0.0, by_key) for _, width in pieces),
                filled((columns,), MASKED, by_head),
                filled((tile, columns), 0.0, by_key),
            )
            accs, m, total = lax.fori_loop(0, num_tiles, step, begin)
            for i, acc in enumerate(accs):
                store(part_ref.at[head, item, pl.ds(i * 64, acc.shape[0])], acc)
            store(stats_ref.at[head, item, 0], m)
            store(stats_ref.at[head, item, 1], total.sum(axis=0))

        num_turns = pl.cdiv(starts_ref[num_rows] * num_kv_heads - program, num_programs)
        lax.fori_loop(0, num_turns, attend, None)

    parts = jax.ShapeDtypeStruct((num_kv_heads, max_items, rows, columns), jnp.float32)
    # Rows 2 and 3 are not used; TMA copies to multiples of 128 bytes.
    stats = jax.ShapeDtypeStruct((num_kv_heads, max_items, 4, columns), jnp.float32)
    as_wgmma = partial(tiled, dtype=q.dtype, swizzle=swizzle)
    kernel = plgpu.kernel(
        paged_decode,
        out_type=(parts, stats),
        grid=(num_programs,),
        grid_names=("program",),
        scratch_types=(
            as_wgmma(columns, head_dim),
            as_wgmma(columns, tile),
            None if source.format is None else as_wgmma(tile, head_dim),
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


def _programs_and_stages(source: Source, columns: int, q, options: Options) -> tuple[int, int]:
    """Programs that share an SM, as many as are asked for and fit with two stages; and stages of each, K and V."""
    itemsize, head_dim = q.dtype.itemsize, q.shape[2]
    stage_bytes = 2 * TILE * source.bytes_per_key()
    own_bytes = columns * (head_dim + TILE) * itemsize + 4096  # q, p, barriers, reductions
    if source.format is not None:
        own_bytes += TILE * head_dim * itemsize
    fitting = gpu_layout.SM_BYTES // (2 * stage_bytes + own_bytes + gpu_layout.RESERVED_BYTES)
    if len(source.arrays) > 1:  # scales and zeros: more registers than a third of an SM's
        fitting = min(fitting, 2)
    per_sm = max(1, min(options.sizes.programs_per_sm, fitting))
    share = gpu_layout.SM_BYTES // per_sm - gpu_layout.RESERVED_BYTES
    return per_sm, min((share - own_bytes) // stage_bytes, gpu_layout.SPLIT // TILE)


def _chunk(rows: int, columns: int) -> int:
    """Parts that are on their way to `_combine` at once: up to 64 KB."""
    return max(1, min(16, 65536 // (4 * rows * columns)))


def _combine(parts, stats, starts, dtype, options: Options):
    """Parts [K, items, D, G] and their maxima and sums [K, items, 4, G], row r's from starts[r] on → [R, K, G, D]."""
    num_kv_heads, _, rows, columns = parts.shape
    num_rows = starts.shape[0] - 1
    chunk, sinks = _chunk(rows, columns), options.sinks
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1)
        sinks = jnp.pad(sinks, ((0, 0), (0, columns - sinks.shape[1])))
    by_head = plgpu.Layout.WGMMA.reduce(0)

    def paged_combine(part_ref, stats_ref, starts_ref, *rest):
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
                part = load(part_smem.at[i], layout=plgpu.Layout.WGMMA)
                part_m = load(stats_smem.at[i, 0], layout=by_head)
                part_total = load(stats_smem.at[i, 1], layout=by_head)
                m_new = jnp.maximum(m, part_m)
                old, new = jnp.exp2(m - m_new), jnp.exp2(part_m - m_new)
                acc = acc * lax.broadcast_in_dim(old, acc.shape, [1])
                acc = acc + part * lax.broadcast_in_dim(new, acc.shape, [1])
                return acc, m_new, total * old + part_total * new

            plgpu.commit_smem()  # what was read before is copied over
            lax.fori_loop(0, num_parts, fetch, None)
            return lax.fori_loop(0, num_parts, add, carry)

        nothing = (
            filled((rows, columns), 0.0, plgpu.Layout.WGMMA),
            filled((columns,), MASKED, by_head),
            filled((columns,), 0.0, by_head),
        )
        acc, m, total = lax.fori_loop(0, pl.cdiv(end - begin, chunk), add_chunk, nothing)
        sinks = [load(ref.at[head], layout=by_head, optimized=False) for ref in sinks_ref]
        out = normalised(acc, m, total, sinks, axis=1).astype(dtype)
        # In the transposed layout a thread's pairs of values lie along D, as they do in memory.
        out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        store(out_ref.at[row, head].transpose((1, 0)), out)

    kernel = plgpu.kernel(
        paged_combine,
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
