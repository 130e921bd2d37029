"""Adds up what several programs computed of a row, for Hopper. Letters are in `gpu.py`.

A part is here what one of them left: the sums of an item of `gpu_decode.py`, or of some keys of a tile of queries.

**Tile.** A program is one warpgroup. It walks rows with one query, or tiles of queries, times KV heads, times pieces of
D, and adds all parts of each in their order. It writes them into an array that has the other results already: rows with
one query and one item are `gpu_decode.py`'s, tiles whose keys are not cut `gpu_prefill.py`'s.

**Groups.** Of rows with one query the parts of a group are added up first (`gpu_layout.Division`), and then the groups.
Where items are whole groups, a group has one part. All parts of a tile are one group.

**Stages.** The first S parts arrive at once, each in a stage of its own. Part i + S comes where part i was.

**Protocol.** The warpgroup starts all copies itself.

    buffer             producer         consumer               barrier               waits for
    parts [i % S]      TMA for part i   warpgroup              ready[i % S], twice   sums and stats to arrive
    the same, free     warpgroup        TMA for part i + S     commit_smem           all threads to have read
    all parts, free    warpgroup        TMA for the next row   commit_smem           the same
    turned, lines      warpgroup        itself, TMA of lines   commit_smem           the writes to be visible
    lines, free        TMA of lines     warpgroup              wait_smem_to_gmem     the lines to have left
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.paged_attention.gpu_layout import Items, rows_of_tile
from pallas_kernels.paged_attention.gpu_tiles import BY_HEAD, Sums, added, no_sums, normalised
from pallas_kernels.wgmma import Ref, load, piece, store, tiled

PROGRAMS_PER_SM = 6  # with 32 KB of parts each
TILE_PROGRAMS_PER_SM = 4  # those for tiles of queries need 16 KB more
HEIGHT = 64  # of the rows of a part, wgmma's: so many are added up at once


class Parts(NamedTuple):
    """What is added up for each item and KV head: arrays or their types, or in a kernel refs.

    For rows with one query `columns` is G as wgmma pads it, and `rows` is D, or 128 for D = 96 (`pieces` in
    `gpu_decode_plan.py`), or the `value_dim` of latents. A tile of queries has 64 columns for each 64 of its rows: one
    KV head is two here, but one at D = 512, where a tile has 64 rows.
    """

    sums: Any  # float32[K, items, rows, columns]: weights times V, not divided by their total
    # float32[K, items, 4, columns]: the maximum score in units of log2, and the total of the weights. The other two
    # rows are not used: TMA copies multiples of 128 bytes.
    stats: Any


class Places(NamedTuple):
    """Where the output of tiles of queries is: int32[tiles] each.

    Of a tile's queries, which begin at `token`, `count` from number `first` on are its own.
    """

    token: Any
    first: Any
    count: Any


class _Groups(NamedTuple):
    """How many parts are a group: int32 each."""

    first: Any  # [R]: the row's first,
    other: Any  # [1]: and each other


class _Inputs(NamedTuple):
    """What the kernel reads, or in the kernel refs to it."""

    parts: Parts
    number: Any  # int32[1]: of rows
    starts: Any  # int32[R + 1]: row r's parts are those from starts[r] to before starts[r + 1]
    groups: _Groups | None  # None if all parts are one group
    sinks: Any  # float32[K, columns], or None
    places: Places | None = None  # of tiles of queries


class _Memory(NamedTuple):
    """A program's shared memory and barriers: their types, or in the kernel refs."""

    parts: Parts  # stages of one KV head's: [stages, rows of a piece, columns] and [stages, 4, columns]
    ready: Any  # a barrier per stage
    turned: Any = None  # [64, 64], in wgmma's layout: a piece of a tile's output, None for rows with one query
    lines: Any = None  # the same, row-major


@dataclass(frozen=True)
class _Plan:
    """What is known before a program runs."""

    num_programs: int
    least_parts: int  # of rows that are written
    tile_q: int | None = None  # queries of a tile; None for rows with one query


def combine(parts: Parts, items: Items, sinks, results: jax.Array, interpret) -> jax.Array:
    """→ `results` [R, K, columns, rows] with those of rows that have several items. sinks: as in `_Inputs`."""
    num_rows = results.shape[0]
    plan = _Plan(_num_programs(parts, num_rows, PROGRAMS_PER_SM), least_parts=2)
    number, groups = jnp.full(1, num_rows, jnp.int32), _Groups(items.in_first_group, items.in_group)
    return _combine(plan, _Inputs(parts, number, items.starts, groups, sinks), results, interpret)


def combine_tiles(
    parts: Parts, number, starts, sinks, places: Places, out: jax.Array, tile_q: int, interpret
) -> jax.Array:
    """→ `out` [T, H, D] with the first `number` tiles of queries, which are the rows of `_Inputs` here.

    Of a tile's rows of wgmma, g * tile_q + i is head g of query i.
    """
    num_programs = _num_programs(parts, places.token.shape[0], TILE_PROGRAMS_PER_SM)
    plan = _Plan(num_programs, least_parts=0, tile_q=tile_q)
    return _combine(plan, _Inputs(parts, number, starts, None, sinks, places), out, interpret)


def _num_programs(parts: Parts, num_rows: int, per_sm: int) -> int:
    num_heads, _, rows, _ = parts.sums.shape
    return min(per_sm * hopper.num_sms(), num_rows * num_heads * (rows // HEIGHT))


def _num_stages(columns: int) -> int:
    """Parts that are on their way to a program at once: up to 32 KB."""
    return max(1, min(16, 32768 // (4 * HEIGHT * columns)))


def _combine(plan: _Plan, inputs: _Inputs, out: jax.Array, interpret) -> jax.Array:
    """`out` with what the kernel writes, in the same memory if nobody else reads that."""
    columns = inputs.parts.sums.shape[3]
    num_stages = _num_stages(columns)
    memory = _Memory(
        parts=Parts(
            sums=plgpu.SMEM((num_stages, HEIGHT, columns), jnp.float32),
            stats=plgpu.SMEM((num_stages, 4, columns), jnp.float32),
        ),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
    )
    if plan.tile_q is not None:
        turned = tiled(columns, HEIGHT, dtype=out.dtype, swizzle=128)
        memory = memory._replace(turned=turned, lines=plgpu.SMEM((columns, HEIGHT), out.dtype))

    def paged_combine(inputs: _Inputs, out_ref: Ref, memory: _Memory):
        _Program(plan, inputs, out_ref, memory).run()

    kernel = plgpu.kernel(
        paged_combine,
        out_type=(),
        grid=(plan.num_programs,),
        grid_names=("program",),
        scratch_types=(memory,),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    # With `jax.new_ref` jax would trace the whole step again, to replace the reference by an array.
    return pl.run_state(partial(kernel, inputs))(out)


def store_transposed(out_ref: Ref, x) -> None:
    """x [rows, columns] in `WGMMA` layout, to out_ref [columns, rows]."""
    x = x.astype(out_ref.dtype)
    # In the transposed layout a thread's pairs of values lie along D, as they do in memory.
    store(out_ref.transpose((1, 0)), plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED))


class _Program:
    """One of `num_programs`. It takes every `num_programs`-th piece of a row and a KV head."""

    def __init__(self, plan: _Plan, inputs: _Inputs, out_ref: Ref, memory: _Memory) -> None:
        self.plan, self.inputs, self.memory = plan, inputs, memory
        self.out = out_ref  # [R, K, columns, rows], or [T, H, D] of tiles
        self.number = lax.axis_index("program")

    def run(self):
        plan, inputs = self.plan, self.inputs
        num_heads, _, rows, _ = inputs.parts.sums.shape
        num_pieces = jnp.int32(rows // HEIGHT)
        of_row = num_heads * num_pieces

        def turn(i, _):
            index = self.number + i * plan.num_programs
            row, place = lax.div(index, of_row), lax.rem(index, of_row)
            head, number = lax.div(place, num_pieces), lax.rem(place, num_pieces)
            num_parts = inputs.starts[row + 1] - inputs.starts[row]
            pl.when(num_parts >= plan.least_parts)(lambda: self._add_up(row, head, number))

        num_turns = pl.cdiv(inputs.number[0] * of_row - self.number, plan.num_programs)
        lax.fori_loop(0, num_turns, turn, None)
        if plan.tile_q is not None:
            plgpu.wait_smem_to_gmem(0)

    def _add_up(self, row, head, number):
        """The parts of piece `number` of a row."""
        inputs, of_piece = self.inputs, piece(number, HEIGHT)
        begin, end = inputs.starts[row], inputs.starts[row + 1]
        plgpu.commit_smem()  # what was read before is copied over
        fetch = partial(self._fetch, head, of_piece)
        at_first = jnp.minimum(end - begin, self.memory.parts.sums.shape[0])
        lax.fori_loop(0, at_first, lambda i, _: fetch(begin + i, i), None)
        add = partial(self._add_parts, fetch, begin, end)
        if inputs.groups is None:
            sums = add(begin, end)
        else:
            sums = self._add_groups(add, row, begin, end)
        sink = inputs.sinks
        if sink is not None:
            sink = load(sink.at[head], layout=BY_HEAD, optimized=False)
        (acc,) = sums.accs
        x = normalised(acc, sums.m, sums.total, sink, axis=1)
        if self.plan.tile_q is None:
            store_transposed(self.out.at[row, head, :, of_piece], x)
        else:
            self._store_tile(row, head, of_piece, x, self.plan.tile_q)

    def _add_groups(self, add, row, begin, end) -> Sums:
        assert self.inputs.groups is not None
        first, other = self.inputs.groups.first[row], self.inputs.groups.other[0]

        def add_group(number, carry):
            sums, part = carry
            stop = jnp.minimum(begin + first + number * other, end)
            return added(sums, add(part, stop)), stop

        num_groups = 1 + pl.cdiv(jnp.maximum(end - begin - first, 0), other)
        return lax.fori_loop(0, num_groups, add_group, (self._none(), begin))[0]

    def _add_parts(self, fetch, begin, end, part, stop) -> Sums:
        """The parts from `part` to before `stop`, of a row's from `begin` to before `end`."""
        memory, num_stages = self.memory, jnp.int32(self.memory.parts.sums.shape[0])

        def add(i, sums):
            stage = lax.rem(i - begin, num_stages)
            plgpu.barrier_wait(memory.ready.at[stage])
            stats = memory.parts.stats
            acc = load(memory.parts.sums.at[stage], layout=plgpu.Layout.WGMMA)
            m, total = (load(stats.at[stage, j], layout=BY_HEAD) for j in (0, 1))

            @pl.when(i + num_stages < end)
            def _():
                plgpu.commit_smem()  # all threads have read the stage
                fetch(i + num_stages, stage)

            return added(sums, Sums((acc,), m, total))

        return lax.fori_loop(part, stop, add, self._none())

    def _fetch(self, head, of_piece, part, stage) -> None:
        parts, into, ready = self.inputs.parts, self.memory.parts, self.memory.ready.at[stage]
        plgpu.copy_gmem_to_smem(parts.sums.at[head, part, of_piece], into.sums.at[stage], ready)
        plgpu.copy_gmem_to_smem(parts.stats.at[head, part], into.stats.at[stage], ready)

    def _none(self) -> Sums:
        return no_sums([HEIGHT], self.memory.parts.sums.shape[2])

    def _store_tile(self, tile, half, of_piece, x, tile_q: int):
        """Copy the tile's own queries to their tokens, row by row. x: [64, 64], a piece of D of 64 rows of wgmma."""
        memory, out, dtype, places = self.memory, self.out, self.out.dtype, self.inputs.places
        assert places is not None
        token, first, count = (each[tile] for each in places)
        num_halves, _, head_dim, _ = self.inputs.parts.sums.shape
        of_head = rows_of_tile(head_dim) // HEIGHT
        group, of_tile = out.shape[1] // (num_halves // of_head), jnp.int32(of_head)
        head, begin = lax.div(half, of_tile) * group, lax.rem(half, of_tile) * 64
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # `lines` have left
        memory.turned.transpose((1, 0))[...] = x.astype(dtype)
        plgpu.commit_smem()
        # By way of registers in which a few threads have a whole line, as in `gpu_prefill.py`.
        by_line = plgpu.Layout.SMEM_GMEM_COPY((64, 64), dtype, 128)
        memory.lines[...] = load(memory.turned, layout=by_line)
        plgpu.commit_smem()
        for g in range(group):
            row = g * tile_q + first - begin  # of `lines`, where the head's first would be

            def write(i, _, g=g, row=row):
                to = out.at[pl.ds(token + first + i, 1), head + g, of_piece]
                plgpu.copy_smem_to_gmem(memory.lines.at[pl.ds(row + i, 1)], to)

            lax.fori_loop(jnp.clip(-row, 0, count), jnp.clip(64 - row, 0, count), write, None)
