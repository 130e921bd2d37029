"""Adds up the parts of rows with one query, for Hopper; the last kernel of a decode step. Letters are in `gpu.py`.

**Tile.** A program is one warpgroup, with all parts of a row and a KV head. It adds them in their order.

**Stages.** A chunk of parts arrives at once, each in a stage of its own, while the first of them are added.

**Protocol.** The warpgroup starts all copies itself: those of a chunk when the previous one has been added.

    buffer             producer         consumer               barrier               waits for
    parts [j]          TMA for part j   warpgroup              ready[j], 2 arrivals  sums and stats to arrive
    all parts, free    warpgroup        TMA of the next chunk  commit_smem           all threads to have read
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_tiles import MASKED, Options, normalised
from pallas_kernels.wgmma import Ref, filled, load, store


class Parts(NamedTuple):
    """What is added up for each item and KV head: arrays or their types, or in a kernel refs.

    `columns` is G as wgmma pads it; `rows` is D, or 128 for D = 96 (`gpu_decode._pieces`).
    """

    sums: Any  # float32[K, items, rows, columns]: weights times V, not divided by their total
    # float32[K, items, 4, columns]: the maximum score in units of log2, and the total of the weights. The other two
    # rows are not used: TMA copies multiples of 128 bytes.
    stats: Any


def _chunk(rows: int, columns: int) -> int:
    """Parts that are on their way to a program at once: up to 64 KB."""
    return max(1, min(16, 65536 // (4 * rows * columns)))


class _Inputs(NamedTuple):
    """What the kernel reads, or in the kernel refs to it."""

    parts: Parts
    starts: Any  # int32[R + 1], of `Splits`
    sinks: Any  # float32[K, columns], or None


class _Memory(NamedTuple):
    """A program's shared memory and barriers: their types, or in the kernel refs."""

    parts: Parts  # a chunk of one KV head's: [chunk, rows, columns] and [chunk, 4, columns]
    ready: Any  # a barrier per part of a chunk


def combine(parts: Parts, starts, dtype, options: Options):
    """Row r's parts are those from starts[r] to before starts[r + 1] → [R, K, columns, rows]."""
    num_kv_heads, _, rows, columns = parts.sums.shape
    num_rows = starts.shape[0] - 1
    chunk, sinks = _chunk(rows, columns), options.sinks
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1)
        sinks = jnp.pad(sinks, ((0, 0), (0, columns - sinks.shape[1])))
    by_head = plgpu.Layout.WGMMA.reduce(0)

    def paged_combine(inputs: _Inputs, out_ref: Ref, memory: _Memory):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        begin, end = inputs.starts[row], inputs.starts[row + 1]

        def add_chunk(turn, carry):
            item = begin + turn * chunk
            num_parts = jnp.minimum(end - item, chunk)

            def fetch(i, _):
                for ref, smem in zip(inputs.parts, memory.parts, strict=True):
                    plgpu.copy_gmem_to_smem(ref.at[head, item + i], smem.at[i], memory.ready.at[i])

            def add(i, carry):
                acc, m, total = carry
                plgpu.barrier_wait(memory.ready.at[i])
                stats = memory.parts.stats
                part = load(memory.parts.sums.at[i], layout=plgpu.Layout.WGMMA)
                part_m = load(stats.at[i, 0], layout=by_head)
                part_total = load(stats.at[i, 1], layout=by_head)
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
        sink = inputs.sinks
        if sink is not None:
            sink = load(sink.at[head], layout=by_head, optimized=False)
        out = normalised(acc, m, total, sink, axis=1).astype(dtype)
        # In the transposed layout a thread's pairs of values lie along D, as they do in memory.
        out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        store(out_ref.at[row, head].transpose((1, 0)), out)

    kernel = plgpu.kernel(
        paged_combine,
        out_type=jax.ShapeDtypeStruct((num_rows, num_kv_heads, columns, rows), dtype),
        grid=(num_kv_heads, num_rows),
        grid_names=("head", "row"),
        scratch_types=(
            _Memory(
                parts=Parts(
                    sums=plgpu.SMEM((chunk, rows, columns), jnp.float32),
                    stats=plgpu.SMEM((chunk, 4, columns), jnp.float32),
                ),
                ready=plgpu.Barrier(num_arrivals=2, num_barriers=chunk),
            ),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=options.interpret,
    )
    return kernel(_Inputs(parts, starts, sinks))
