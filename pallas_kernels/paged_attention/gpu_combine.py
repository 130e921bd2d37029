"""Adds up the parts that the keys of a row were cut into, for Hopper. Letters are in `gpu.py`.

**Tile.** A program is one warpgroup. It walks rows with one query, or tiles of queries, times KV heads, times pieces of
D, and adds all parts of each in their order. Rows with one query and one part are left out: `gpu_decode.py` wrote their
result.

**Stages.** A chunk of parts arrives at once, each in a stage of its own, while the first of them are added.

**Protocol.** The warpgroup starts all copies itself: those of a chunk when the previous one has been added.

    buffer             producer         consumer               barrier               waits for
    parts [j]          TMA for part j   warpgroup              ready[j], 2 arrivals  sums and stats to arrive
    all parts, free    warpgroup        TMA of the next chunk  commit_smem           all threads to have read
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.paged_attention.gpu_tiles import MASKED, normalised
from pallas_kernels.wgmma import Ref, filled, load, piece, store

PROGRAMS_PER_SM = 3  # with 64 KB of parts each


class Parts(NamedTuple):
    """What is added up for each item and KV head: arrays or their types, or in a kernel refs.

    For rows with one query `columns` is G as wgmma pads it, and `rows` is D, or 128 for D = 96 (`gpu_decode._pieces`).
    A tile of queries is two KV heads here, of 64 columns each.
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
    number: Any  # int32[1]: of rows
    starts: Any  # int32[R + 1]: row r's parts are those from starts[r] to before starts[r + 1]
    sinks: Any  # float32[K, columns], or None


class _Memory(NamedTuple):
    """A program's shared memory and barriers: their types, or in the kernel refs."""

    # a chunk of one KV head's: [chunk, rows of a piece, columns] and [chunk, 4, columns]
    parts: Parts
    ready: Any  # a barrier per part of a chunk


def combine(
    parts: Parts,
    number,
    starts,
    sinks,
    out: jax.Array | jax.ShapeDtypeStruct,
    interpret,
    *,
    rows_of_piece: int = 0,
) -> jax.Array:
    """→ [R, K, columns, rows], of which the first `number` are written. Otherwise as in `_Inputs`.

    `out`: an array that has the results of rows with one part already, so that only others are written; or the shape. A
    program adds `rows_of_piece` rows at once, by default all.
    """
    num_rows, num_kv_heads, columns, rows = out.shape
    height, has_results = rows_of_piece or rows, isinstance(out, jax.Array)
    chunk = _chunk(height, columns)
    num_programs = min(
        PROGRAMS_PER_SM * hopper.num_sms(), num_rows * num_kv_heads * (rows // height)
    )

    def paged_combine(inputs: _Inputs, out_ref: Ref, memory: _Memory):
        _Program(inputs, out_ref, memory, num_programs, 2 if has_results else 0).run()

    kernel = plgpu.kernel(
        paged_combine,
        out_type=() if has_results else out,
        grid=(num_programs,),
        grid_names=("program",),
        scratch_types=(
            _Memory(
                parts=Parts(
                    sums=plgpu.SMEM((chunk, height, columns), jnp.float32),
                    stats=plgpu.SMEM((chunk, 4, columns), jnp.float32),
                ),
                ready=plgpu.Barrier(num_arrivals=2, num_barriers=chunk),
            ),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    inputs = _Inputs(parts, number, starts, sinks)
    if not has_results:
        return kernel(inputs)
    results = jax.new_ref(out)
    kernel(inputs, results)
    return jax.freeze(results)


def store_transposed(out_ref: Ref, x) -> None:
    """x [rows, columns] in `WGMMA` layout, to out_ref [columns, rows]."""
    x = x.astype(out_ref.dtype)
    # In the transposed layout a thread's pairs of values lie along D, as they do in memory.
    store(out_ref.transpose((1, 0)), plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED))


class _Program:
    """One of `num_programs`. It takes every `num_programs`-th piece of a row and a KV head."""

    def __init__(
        self,
        inputs: _Inputs,
        out_ref: Ref,
        memory: _Memory,
        num_programs: int,
        least_parts: int,
    ) -> None:
        self.inputs, self.memory, self.num_programs = inputs, memory, num_programs
        self.least_parts = least_parts  # of the rows that are written
        self.out = out_ref  # [R, K, columns, rows]
        self.number = lax.axis_index("program")

    def run(self):
        num_kv_heads, _, rows, _ = self.inputs.parts.sums.shape
        num_pieces = rows // self.memory.parts.sums.shape[1]
        of_row = num_kv_heads * num_pieces

        def turn(i, _):
            index = self.number + i * self.num_programs
            row, place = lax.div(index, jnp.int32(of_row)), lax.rem(index, jnp.int32(of_row))
            head, number = lax.div(place, jnp.int32(num_pieces)), lax.rem(place, num_pieces)
            num_parts = self.inputs.starts[row + 1] - self.inputs.starts[row]
            pl.when(num_parts >= self.least_parts)(lambda: self._add_up(row, head, number))

        num_turns = pl.cdiv(self.inputs.number[0] * of_row - self.number, self.num_programs)
        lax.fori_loop(0, num_turns, turn, None)

    def _add_up(self, row, head, number):
        """The parts of piece `number` of a row."""
        chunk, height, columns = self.memory.parts.sums.shape
        by_head, inputs = plgpu.Layout.WGMMA.reduce(0), self.inputs
        begin, end = inputs.starts[row], inputs.starts[row + 1]
        of_piece = piece(number, height)
        nothing = (
            filled((height, columns), 0.0, plgpu.Layout.WGMMA),
            filled((columns,), MASKED, by_head),
            filled((columns,), 0.0, by_head),
        )
        add_chunk = partial(self._add_chunk, head, of_piece, begin, end)
        acc, m, total = lax.fori_loop(0, pl.cdiv(end - begin, chunk), add_chunk, nothing)
        sink = inputs.sinks
        if sink is not None:
            sink = load(sink.at[head], layout=by_head, optimized=False)
        out = self.out.at[row, head, :, of_piece]
        store_transposed(out, normalised(acc, m, total, sink, axis=1))

    def _add_chunk(self, head, of_piece, begin, end, turn, carry):
        memory, parts, chunk = self.memory, self.inputs.parts, self.memory.parts.sums.shape[0]
        item, by_head = begin + turn * chunk, plgpu.Layout.WGMMA.reduce(0)
        num_parts = jnp.minimum(end - item, chunk)

        def fetch(i, _):
            ready = memory.ready.at[i]
            sums, stats = parts.sums.at[head, item + i, of_piece], parts.stats.at[head, item + i]
            plgpu.copy_gmem_to_smem(sums, memory.parts.sums.at[i], ready)
            plgpu.copy_gmem_to_smem(stats, memory.parts.stats.at[i], ready)

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
