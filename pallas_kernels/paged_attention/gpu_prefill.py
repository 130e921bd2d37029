"""Paged attention of rows with several queries, for Hopper: bound by the tensor cores.

Knows tiles of queries and what each of a program's three warpgroups (WG) does. Letters and principles are in `gpu.py`.

**Tile.** 128 / G queries times G heads are 128 rows of wgmma, so that a KV head's keys are read once for its group. A
program walks many such tiles. WG 0 and 1 compute 64 rows each; WG 2 copies, also for the next tile while this one is
being finished. Only key tiles on the diagonal or on the window's edge are masked.

**Stages.** Step i multiplies tile i of all key tiles that a program copies; K and V lie in stage i % S of rings of
their own. QK is S = Q K', PV is O += P V.

**Protocol.** "free" means that the buffer may be written again.

    buffer               producer            consumer        barrier                      waits for
    arrived              WG 2: TMA           WG 0, 1         queries_ready, an arrival for each copy
    arrived, free        WG 0, 1             WG 2            queries_done, 2 arrivals     both halves to be read (*)
    queries              WG 0, 1             its own wgmma   commit_smem                  the writes to be visible
    keys [i % S]         WG 2: TMA, step i   QK of WG 0, 1   keys.stages.ready[i % S]     the tile's blocks to arrive
    keys [i % S], free   QK of WG 0, 1       WG 2            keys.done[i % S], 2 arr.     both to have read them
    values [i % S]       like keys, with PV in place of QK
    output               WG 0, 1             WG 0: TMA       written, 2 arrivals          both halves
    output, free         WG 0: TMA           WG 0, 1         wait_smem_to_gmem, met       the last copy to have left

(*) Where there is no room for `arrived`, it is `output`, and free when that has been sent. At head dim 256 it has half
the columns and goes through the above for one half, then for the other; the first half is free when read.

At head dim 512 a tile is 64 rows, of 64 / G queries, and there is one stage. WG 0 and 1 compute the same S, and each O
for half of V's columns, since registers have room for 256. Each moves queries and output of its columns, a strip of
either at once. They meet (`met`) before QK reads the queries, and after the last QK, before output is put there.

WG 0 and 1 take turns: one has the tensor cores while the other computes exponentials (Shah et al., FlashAttention-3,
arXiv:2407.08608). `in_turn` (2 arrivals) ends each half step, and WG 1 is half a step behind. For step i of a tile:

    between phases of in_turn   WG 0                                  WG 1
    2 i + 1 and 2 i + 2         softmax of step i                     computes PV of i - 1, starts QK of i
    2 i + 2 and 2 i + 3         computes PV of i, starts QK of i + 1  softmax of step i

Where keys are cut (`gpu_layout.Cuts`) a tile is one part of its keys. Each warpgroup stores its own sums straight into
memory, for the kernel that adds them up, and `output` is not written.

Of quantised pools there are no turns: WG 0 widens the keys and WG 1 the values of each step, so `done` has one arrival.
They meet before QK, when both are written (`wide`, `factors`), and after PV, when both are read.
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
from pallas_kernels.paged_attention.gpu_prefill_plan import (
    Memory,
    Piece,
    Plan,
    Share,
    Tile,
    memory_of,
    put,
)
from pallas_kernels.paged_attention.gpu_tiles import (
    MASKED,
    PoolArrays,
    clear_outside,
    hidden_zero,
    normalised,
    scores,
    weights,
    without_zeros,
)
from pallas_kernels.wgmma import (
    Ref,
    added_product,
    as_operand,
    filled,
    load,
    meet,
    piece,
    product,
    store,
)


class Inputs(NamedTuple):
    """What the kernel reads, or in the kernel refs to it."""

    queries: Any  # [T, H, columns], bfloat16 or float16
    block_table: Any  # int32[R, M]
    tiles: gpu_layout.QueryTiles
    pool: PoolArrays
    sinks: Any  # float32[K, rows of a tile], or None; also for parts, which `combine` adds them to


def kernel(plan: Plan, inputs: Inputs, out_type):
    """With outputs of the shapes of `out_type`: like the queries, or `Parts` if `plan.in_parts`."""

    def paged_prefill(inputs: Inputs, out_ref: Any, **memory):
        program = _Program(plan, inputs, out_ref, Memory.of(plan, **memory))
        pl.when(program.warpgroup == 2)(program.copy)
        pl.when(program.warpgroup < 2)(program.compute)

    return plgpu.kernel(
        paged_prefill,
        out_type=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out_type),
        grid=(plan.num_programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=memory_of(plan, inputs.queries.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plan.options.interpret,
    )


class _Program:
    """One of `num_programs`, traced for each of its three warpgroups."""

    def __init__(self, plan: Plan, inputs: Inputs, out_ref: Ref, memory: Memory) -> None:
        self.plan, self.inputs, self.memory = plan, inputs, memory
        self.out = out_ref  # [T, H, columns], like the queries; or `Parts`
        self.dtype = inputs.queries.dtype
        self.warpgroup, self.number = lax.axis_index("warpgroup"), lax.axis_index("program")
        self.mine = Share(plan, self.warpgroup, self.dtype)
        # Only these two differ in the interpreter.
        weights_smem = memory.weights
        if weights_smem is not None:
            weights_smem = weights_smem.at[piece(self.warpgroup, 64)]
        self.as_operand = partial(as_operand, smem=weights_smem)
        self.added_product = partial(added_product, interpret=plan.options.interpret)
        all_tiles = inputs.tiles.number[0] * plan.num_kv_heads
        whole = lax.div(all_tiles, jnp.int32(plan.num_programs))
        left = lax.rem(all_tiles, jnp.int32(plan.num_programs))
        self.num_turns = whole + (self._place(whole) < left).astype(jnp.int32)

    def _place(self, turn):
        """Forth and back: each turn's first tiles are its longest."""
        last = self.plan.num_programs - 1
        return jnp.where(lax.rem(turn, 2) == 0, self.number, last - self.number)

    def _tile_of(self, turn) -> Tile:
        index = turn * self.plan.num_programs + self._place(turn)
        heads = jnp.int32(self.plan.num_kv_heads)
        item, head = lax.div(index, heads), lax.rem(index, heads)
        return Tile.of(self.plan, self.inputs.tiles, item, head)

    # The warpgroup that copies.

    def copy(self):
        plgpu.set_max_registers(40, action="decrease")
        copied = lax.fori_loop(0, self.num_turns, self._copy_tile, jnp.int32(0))
        # Who waits at a barrier once has to see each of its phases.
        for ring in (self.memory.keys, self.memory.values):
            lax.fori_loop(
                copied, copied + ring.num, lambda i, _, r=ring: r.wait_until_free(i), None
            )
        pl.when(self.num_turns > 0)(lambda: plgpu.barrier_wait(self.memory.queries_done))

    def _copy_tile(self, turn, copied):
        """`copied` tiles of keys came before; returns how many came till now."""
        plan, inputs, memory, at = self.plan, self.inputs, self.memory, self._tile_of(turn)
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(memory.queries_done))
        tokens = pl.ds(at.token, plan.tile_q)
        for strips in plan.pieces:
            if strips != plan.pieces[0]:
                plgpu.barrier_wait(memory.queries_done)
            for g, strip, of_strip in plan.copies(strips):
                queries = inputs.queries.at[tokens, at.head * plan.group + g, of_strip]
                into = memory.arrived.at[strip, pl.ds(g * plan.tile_q, plan.tile_q)]
                plgpu.copy_gmem_to_smem(queries, into, memory.queries_ready)

        def block_of(position):
            inside = jnp.clip(position, at.begin, at.end - 1)
            return inputs.block_table[at.row, lax.div(inside, jnp.int32(plan.source.block_size))]

        def fetch(i, copied):
            # Not all are looked up at once: there are few registers.
            slot_of = partial(plan.source.slot, block_of, plan.tile, (at.first + i) * plan.tile)
            for which, ring in enumerate((memory.keys, memory.values)):
                ring.wait_until_free(copied)
                column, stage = 2 * at.head + which, ring.stage(copied)
                plan.source.fetch(inputs.pool, slot_of, column, ring.stages, stage)
            return copied + 1

        return lax.fori_loop(0, at.num_keys, fetch, copied)

    # The two that compute.

    def compute(self):
        plgpu.set_max_registers(232, action="increase")
        lax.fori_loop(0, self.num_turns, self._attend, jnp.int32(0))
        pl.when(self.warpgroup == 0)(lambda: plgpu.wait_smem_to_gmem(0))

    def _attend(self, turn, used):
        """`used` tiles of keys came before; returns how many came till now."""
        plan, memory, at = self.plan, self.memory, self._tile_of(turn)
        by_row = plgpu.Layout.WGMMA.reduce(1)
        for strips in plan.pieces:
            plgpu.barrier_wait(memory.queries_ready)
            for _, part, of_piece, by_line in self.mine.parts(strips):
                arrived = load(memory.arrived.at[of_piece], layout=by_line, optimized=False)
                put(memory.queries, part, arrived)
            if plan.early or strips != plan.pieces[-1]:
                plgpu.commit_smem()
                plgpu.barrier_arrive(memory.queries_done)
        if not plan.early:
            plgpu.commit_smem()
        if plan.by_columns:
            meet(memory.met)  # either has half the queries' columns
        carry = (
            filled((64, plan.columns), 0.0, plgpu.Layout.WGMMA),
            filled((64,), MASKED, by_row),
            filled((64,), 0.0, by_row),
            None,
        )
        query_sums = None
        if plan.source.has_scales:
            queries = load(memory.queries.at[self.mine.rows], layout=plgpu.Layout.WGMMA)
            query_sums = queries.astype(jnp.float32).sum(axis=1)
            carry = (*carry[:3], carry[2])
        edge, whole = at.unmasked(plan)
        step = partial(self._step, at=at, used=used, query_sums=query_sums)
        if plan.plain:  # the second lets the first go ahead
            pl.when(self.warpgroup == 1)(lambda: meet(memory.in_turn))
        if plan.options.window is not None:
            carry = lax.fori_loop(0, edge, partial(step, masked=True), carry)
        carry = lax.fori_loop(edge, whole, partial(step, masked=False), carry)
        acc, m, total, zeros = lax.fori_loop(whole, at.num_keys, partial(step, masked=True), carry)
        if zeros is not None:
            acc = without_zeros(acc, zeros, plan.source.boost(self.dtype), axis=0)
        if plan.plain:
            pl.when(self.warpgroup == 0)(lambda: meet(memory.in_turn))
        if plan.in_parts:
            self._finish_part(turn, at, acc, m, total)
            return used + at.num_keys
        sink = self.inputs.sinks
        if sink is not None:
            sink = load(sink.at[at.head, self.mine.rows], layout=by_row, optimized=False)
        self._finish(normalised(acc, m, total, sink, axis=0), at)
        return used + at.num_keys

    def _step(self, i, carry, *, at: Tile, used, query_sums, masked: bool):
        """carry: O, maxima, totals, and zeros as in `gpu_decode._Sums`, which are taken from O in the end."""
        plan, memory, (acc, m, total, zeros) = self.plan, self.memory, carry
        number, start = used + i, (at.first + i) * plan.tile
        if plan.plain:
            memory.keys.wait(number)
            keys, values = memory.keys.tile(number), memory.values.tile(number)
            started = partial(meet, memory.in_turn)
        else:
            self._widen(number, start, at)
            (keys, values), started = memory.wide, None
        rows = piece(hidden_zero(number), 64) if plan.by_columns else self.mine.rows
        s = product(memory.queries.at[rows], keys.transpose((1, 0)), started=started)
        if plan.plain:
            memory.keys.release(number)
        by_query = partial(lax.broadcast_in_dim, shape=s.shape, broadcast_dimensions=[0])
        if query_sums is not None:
            scale, zero = self._factors(0)
            s = (s - zero * by_query(query_sums)) * scale
        s, unit = scores(s, self._visible(at, start) if masked else None, plan.options)
        m, rescale, p = weights(s, unit, m, axis=1)
        total = total * rescale + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])
        if zeros is not None:
            scale, zero = self._factors(1)
            p = p * scale
            zeros = zeros * rescale + (p * zero).sum(axis=1)
        p = p.astype(self.dtype)
        if plan.plain:
            # All of the above belongs before the other's turn.
            acc, m, total, p = lax.optimization_barrier((acc, m, total, p))
            plgpu.barrier_arrive(memory.in_turn)
            memory.values.wait(number)
            if masked:
                self._clear(values, start, at)
            if plan.by_columns:
                values = values.at[:, self.mine.columns]
            plgpu.barrier_wait(memory.in_turn)
        acc = self.added_product(acc, self.as_operand(p), values)
        if plan.plain:
            memory.values.release(number)
        else:
            meet(memory.met)  # before another tile is written over this one
        return acc, m, total, zeros

    def _factors(self, which: int):
        """Scale and zero of the keys (0) or values (1) of the tile in `wide`, as their scores are."""
        factors, by_key = self.memory.factors, plgpu.Layout.WGMMA.reduce(0)
        assert factors is not None
        rows = (load(factors.at[which, i], layout=by_key) for i in (0, 1))
        return tuple(lax.broadcast_in_dim(row, (64, self.plan.tile), [1]) for row in rows)

    def _visible(self, at: Tile, start):
        """Which of the keys from `start` on this warpgroup's queries may see."""
        shape, window = (64, self.plan.tile), self.plan.options.window
        row = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        if not self.plan.by_columns:
            row = row + self.warpgroup * 64
        position = (at.bottom - at.skipped) + lax.rem(row, jnp.int32(self.plan.tile_q))
        query = lax.broadcast_in_dim(position, shape, [0])
        key = start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        return key <= query if window is None else (key <= query) & (key > query - window)

    def _clear(self, values, start, at: Tile):
        """Zero the rows of V outside [begin, end). The first warpgroup does it for both: the second reads them half a
        step later.
        """
        outside = (start < at.begin) | (start + self.plan.tile > at.end)

        @pl.when((self.warpgroup == 0) & outside)
        def _():
            for i in range(0, self.plan.tile, 64):
                clear_outside(values.at[pl.ds(i, 64)], start + i, at.begin, at.end)
            plgpu.commit_smem()

    def _widen(self, number, start, at: Tile):
        """One warpgroup widens the keys, the other the values."""
        plan, memory, bounds = self.plan, self.memory, (at.begin, at.end)
        boosts = 1.0, plan.source.boost(self.dtype)

        def widen(which, ring):
            ring.wait(number)
            stages, stage = ring.stages, ring.stage(number)
            plan.source.widen(stages, stage, memory.wide[which], start, bounds if which else None)
            if memory.factors is not None:
                for row in range(0, plan.tile, 64):
                    where = stages, stage, row, 2 * at.head + which, start, bounds
                    for i, factor in enumerate(plan.source.factors(*where, boosts[which])):
                        store(memory.factors.at[which, i, pl.ds(row, 64)], factor)
            plgpu.commit_smem()
            ring.release(number)

        for which, ring in enumerate((memory.keys, memory.values)):
            pl.when(self.warpgroup == which)(partial(widen, which, ring))
        meet(memory.met)

    def _finish(self, out, at: Tile):
        plan, memory, out = self.plan, self.memory, out.astype(self.dtype)
        first = self.warpgroup == 0
        if plan.by_columns:
            meet(memory.met)
        for strips in plan.pieces:
            for own, part, *_ in self.mine.parts(strips):  # where nobody reads queries any more
                put(memory.queries, part, out[:, own])
        for strips in plan.pieces:
            # The output before, which the first has sent, must have left.
            pl.when(first)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
            meet(memory.met)
            for _, part, of_piece, by_line in self.mine.parts(strips):
                put(memory.output, of_piece, load(memory.queries.at[part], layout=by_line))
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.written)

            pl.when(first)(partial(self._write, at, strips))
        if not plan.early:
            pl.when(first)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
            plgpu.barrier_arrive(memory.queries_done)

    def _finish_part(self, turn, at: Tile, acc, m, total):
        heads = jnp.int32(self.plan.num_kv_heads)
        half = at.head if self.plan.by_columns else 2 * at.head + self.warpgroup
        item = lax.div(turn * self.plan.num_programs + self._place(turn), heads)
        # In the transposed layout a thread's pairs of values lie along rows, as they do in memory.
        acc = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
        sums = self.out.sums.at[half, item, self.mine.columns]
        store(sums.transpose((1, 0)), acc)

        def store_stats():
            store(self.out.stats.at[half, item, 0], m)
            store(self.out.stats.at[half, item, 1], total)

        if self.plan.by_columns:  # both have the same
            pl.when(self.warpgroup == 0)(store_stats)
        else:
            store_stats()
        if not self.plan.early:
            plgpu.barrier_arrive(self.memory.queries_done)

    def _write(self, at: Tile, strips: Piece):
        """When both halves are there. Of a head's rows of `output`, `count` from `skipped` on are the tile's own."""
        plan = self.plan
        plgpu.barrier_wait(self.memory.written)

        def write(i, num_queries):
            for g, strip, of_strip in plan.copies(strips):
                head = at.head * plan.group + g
                to = self.out.at[pl.ds(at.token + i, num_queries), head, of_strip]
                part = self.memory.output.at[strip, pl.ds(g * plan.tile_q + i, num_queries)]
                plgpu.copy_smem_to_gmem(part, to)

        pl.when(at.count == plan.tile_q)(lambda: write(0, plan.tile_q))

        @pl.when(at.count < plan.tile_q)
        def _():
            lax.fori_loop(at.skipped, at.skipped + at.count, lambda i, _: write(i, 1), None)
