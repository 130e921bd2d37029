"""What the TPU kernel computes: packed queries attend to the keys of their rows. Letters as in `tpu.py`.

A *unit* is a tile of packed queries and a row with tokens in it. Its keys come in fetches of a few tiles of `tile_kv`
each, later ones on their way while one is computed (`tpu_tile.py`), over the border of two units too. Tiles begin at
multiples of `tile_kv` whatever the batch is, and so does the order of every sum: a row's result depends on nothing but
the row. Knows nothing of who wrote the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import repeat
from pallas_kernels.paged_attention.tpu_shape import (
    QUERY_BUFFERS,
    UNROLLED_BLOCKS,
    Shape,
)
from pallas_kernels.paged_attention.tpu_spread import collect_results, pick, put, spread_queries
from pallas_kernels.paged_attention.tpu_tile import (
    Scratch,
    add_tiles,
    begin,
    clear_others,
    finish,
    widen_factors,
)
from pallas_kernels.paged_attention.tpu_work import Units


@dataclass(frozen=True, kw_only=True)
class Attend:
    """A turn is one fetch of keys of one unit."""

    units: Units
    q_refs: Sequence  # see `tpu_layout.to_tiles`
    pool_refs: Sequence
    out_ref: Any  # see `tpu_layout.from_tiles`
    sinks_ref: Any  # float32[K', A, 1] or None
    scratch: Scratch
    beside: Callable[[jax.Array], None] | None  # is called with each unit when it begins

    @property
    def shape(self) -> Shape:
        return self.units.rows.shape

    def run(self) -> None:
        units = self.units
        later = (jnp.int32(0), units.fetches(0)[0])
        for stage in range(self.shape.kv_buffers - 1):
            self.prefetch(*later, stage)
            later = units.following(*later)
        pl.when(units.total > 0)(lambda: self.start_queries(0))

        def attend(unit, carry):
            self.begin_unit(unit)
            if self.beside is not None:
                self.beside(unit)
            carry = lax.fori_loop(*units.fetches(unit), partial(self.turn, unit), carry)
            self.end_unit(unit)
            return carry

        lax.fori_loop(0, units.total, attend, (jnp.int32(0), *later))
        last = units.visit[jnp.maximum(units.total - 1, 0)]
        num_visits = jnp.where(units.total > 0, last + 1, 0)
        repeat(jnp.maximum(num_visits - 2, 0), num_visits, self.wait_for_out)

    def turn(self, unit, fetch, carry):
        units, scratch, shape = self.units, self.scratch, self.shape
        stage, later_unit, later_fetch = carry
        self.prefetch(later_unit, later_fetch, self.next_stage(stage, shape.kv_buffers - 1))
        first, end = units.keys_of_fetch(unit, fetch)
        is_whole = (first == 0) & (end == shape.fetch_kv)
        pl.when(is_whole)(lambda: self.wait_for_all(stage))
        pl.when(~is_whole)(lambda: self.wait_for_part(first, end, stage))
        widen_factors(shape, scratch, stage, first, end)
        queries = self.operand_of(unit)
        add = partial(add_tiles, shape, scratch, queries, stage)
        if shape.tiles_of_fetch > 1:
            bits = shape.tile_kv.bit_length() - 1
            tiles = first >> bits, (end + shape.tile_kv - 1) >> bits
            pl.when(is_whole)(lambda: add(range(shape.tiles_of_fetch), None))

            @pl.when(~is_whole)
            def _():
                repeat(*tiles, lambda tile: add([tile], self.visible(unit, fetch, tile)))

        elif shape.tile_q == 1:
            add([0], self.visible(unit, fetch, 0))
        else:  # a mask is a quarter of the vector unit's work
            is_clear = self.all_visible(unit, fetch)
            pl.when(is_clear)(lambda: add([0], None))
            pl.when(~is_clear)(lambda: add([0], self.visible(unit, fetch, 0)))
        return self.next_stage(stage, 1), *units.following(later_unit, later_fetch)

    def visible(self, unit, fetch, tile):
        """bool[1 or A, B]: which keys of a tile of the fetch a row of queries sees."""
        units, shape = self.units, self.shape
        key = tile * shape.tile_kv + lax.broadcasted_iota(jnp.int32, (1, shape.tile_kv), 1)
        if shape.tile_q == 1:
            first, end = units.keys_of_fetch(unit, fetch)
            return (key >= first) & (key < end)
        position = _tokens(shape, units.query_tile[unit]) - fetch * shape.fetch_kv
        position += units.rows.queries(units.row[unit])[2]
        visible = key <= position
        if shape.mask[1] is not None:
            visible &= key > position - shape.mask[1]
        return visible

    def all_visible(self, unit, fetch):
        """Whether all queries of the unit see all keys of the fetch."""
        units, shape = self.units, self.shape
        first_query, _, before = units.rows.queries(units.row[unit])
        first_query = jnp.maximum(first_query, units.query_tile[unit] * shape.tile_q)
        begin, window = fetch * shape.fetch_kv, shape.mask[1]
        is_past = begin + shape.fetch_kv <= first_query + before + 1
        return is_past if window is None else is_past & (begin >= units.end_key[unit] - window)

    def prefetch(self, unit, fetch, stage) -> None:
        """Starts the copies of a fetch's blocks with keys of the unit, data and scales."""
        blocks = self.shape.fetch_kv // self.shape.block_size

        def start(number) -> None:
            rows, row = self.units.rows, self.units.row[unit]
            if isinstance(number, int):
                block = rows.block_of_fetch(row, fetch, number)
            else:
                block = rows.block(row, fetch * blocks + number)
            for pool_ref, buffer, sem in self.kv_buffers(stage):
                own = pool_ref.at[(block, *self.shape.own_lanes)]
                pltpu.make_async_copy(own, buffer.at[number], sem).start()

        @pl.when(unit < self.units.total)
        def _():
            first, end = self.blocks_of(*self.units.keys_of_fetch(unit, fetch))
            if blocks > UNROLLED_BLOCKS:
                repeat(first, end, start)
                return
            is_whole = (first == 0) & (end == blocks)

            @pl.when(is_whole)
            def _():
                for number in range(blocks):
                    start(number)

            pl.when(~is_whole)(lambda: repeat(first, end, start))

    def wait_for_all(self, stage) -> None:
        for _, buffer, sem in self.kv_buffers(stage):
            # Waiting needs no more than the size.
            pltpu.make_async_copy(buffer, buffer, sem).wait()

    def wait_for_part(self, first, end, stage) -> None:
        def wait(number) -> None:
            for _, buffer, sem in self.kv_buffers(stage):
                block = buffer.at[number]
                pltpu.make_async_copy(block, block, sem).wait()

        repeat(*self.blocks_of(first, end), wait)
        clear_others(self.shape, self.scratch, stage, first, end)

    def kv_buffers(self, stage) -> list[tuple]:
        """Source, buffer of a fetch and semaphore, for the pool's data and for its scales."""
        buffers = [self.scratch.kv, self.scratch.scale_zero]
        sem = self.scratch.kv_sems.at[stage]
        return [
            (pool_ref, buffer.at[stage], sem)
            for pool_ref, buffer in zip(self.pool_refs, buffers, strict=False)
        ]

    def next_stage(self, stage, count: int):
        """The buffer of keys that comes so many after."""
        stage, buffers = stage + count, self.shape.kv_buffers
        return jnp.where(stage >= buffers, stage - buffers, stage)

    def blocks_of(self, first, end):
        """The blocks [first, end) with those keys of a fetch."""
        block_size = self.shape.block_size
        bits = block_size.bit_length() - 1
        return first >> bits, (end + block_size - 1) >> bits

    def start_queries(self, unit) -> None:
        """Starts the copies of the unit's tile of queries."""
        buffer, sem = self.queries_of(unit)
        for ref, (first, end) in zip(self.q_refs, self.shape.query_parts, strict=True):
            own = buffer
            if len(self.q_refs) > 1:
                own = buffer.at[:, :, :, pl.ds(first, end - first)]
            self.for_each_part(
                *(ref, self.units.query_tile[unit], own),
                lambda source, into: pltpu.make_async_copy(source, into, sem).start(),
            )

    def start_out(self, unit) -> None:
        """Starts the copies of the tile's results."""
        buffer, sem = self.out_of(self.units.visit[unit])
        self.for_each_part(
            *(self.out_ref, self.units.query_tile[unit], buffer),
            lambda into, source: pltpu.make_async_copy(source, into, sem).start(),
        )

    def wait_for_out(self, visit) -> None:
        buffer, sem = self.out_of(visit)
        pltpu.make_async_copy(buffer, buffer, sem).wait()

    def queries_of(self, unit) -> tuple:
        """The buffer, and its semaphore."""
        stage = self.units.visit[unit] & (QUERY_BUFFERS - 1)
        return self.scratch.queries.at[stage], self.scratch.query_sems.at[stage]

    def operand_of(self, unit):
        """The unit's queries, [K', P, A, W], or as `Scratch.queries` if they come by head."""
        spread = self.scratch.spread
        if spread is None:
            return self.queries_of(unit)[0]
        return spread.own if self.shape.picks_rows else spread.queries

    def out_of(self, visit) -> tuple:
        """The buffer that leaves, and its semaphore."""
        return self.scratch.out.at[visit & 1], self.scratch.out_sems.at[visit & 1]

    def results_of(self, visit):
        """Where the results of a tile of queries are collected, [K', P, A, W]."""
        return self.scratch.spread.out if self.scratch.spread else self.out_of(visit)[0]

    def for_each_part(self, ref, query_tile, buffer, act: Callable) -> None:
        """act(part of a tile of `ref`, the same of the buffer): the whole tile, or each head of a flat one that is not
        spread, or shares of the heads. ref: [Q, K', P, A, W], flat [T, H * W] or by head [H, T, W].
        """
        shape = self.shape
        tokens, lanes = shape.tile_tokens, buffer.shape[-1]
        of_tile = pl.ds(pl.multiple_of(query_tile * tokens, tokens), tokens)
        if len(ref.shape) == 3:
            for share in range(shape.num_kv_heads):
                act(ref.at[pl.ds(share * shape.group, shape.group), of_tile], buffer.at[share])
            return
        if len(ref.shape) > 3:
            act(ref.at[query_tile], buffer)
            return
        if shape.spreads_heads:
            act(ref.at[of_tile], buffer)
            return
        for number in range(shape.num_heads * shape.num_planes):
            head, plane = divmod(number, shape.num_planes)
            kv_head, place = divmod(head, shape.group)
            part = buffer.at[kv_head, plane, pl.ds(place * tokens, tokens)]
            act(ref.at[of_tile, pl.ds(number * lanes, lanes)], part)

    def begin_unit(self, unit) -> None:
        units, scratch = self.units, self.scratch

        @pl.when(units.begins_visit(unit))
        def _():
            queries, sem = self.queries_of(unit)
            # Waiting needs no more than the size.
            pltpu.make_async_copy(queries, queries, sem).wait()
            visit = units.visit[unit]
            pl.when(visit >= 2)(lambda: self.wait_for_out(visit))  # of two visits ago
            if scratch.spread:
                spread_queries(self.shape, scratch.spread, queries)

        @pl.when((unit + 1 < units.total) & units.ends_visit(unit))
        def _():
            self.start_queries(unit + 1)

        if scratch.spread and self.shape.picks_rows:
            pick(self.shape, scratch.spread, self.token_of_tile(unit))
        begin(self.shape, scratch)

    def end_unit(self, unit) -> None:
        shape, visit, spread = self.shape, self.units.visit[unit], self.scratch.spread
        if spread and shape.picks_rows:
            keep = partial(put, shape, spread, self.token_of_tile(unit))
        elif shape.tile_q == 1 or shape.one_tile_per_row:
            keep = partial(self.keep, self.results_of(visit), None)
        else:
            first, end = self.units.rows.queries(self.units.row[unit])[:2]
            token = _tokens(shape, self.units.query_tile[unit])
            mine = (token >= first) & (token < end)
            keep = partial(self.keep, self.results_of(visit), mine)
        finish(shape, self.sinks_ref, self.scratch, keep)

        @pl.when(self.units.ends_visit(unit))
        def _():
            if spread:
                collect_results(shape, spread, self.out_of(visit)[0])
            self.start_out(unit)

    def keep(self, out, mine, stack, plane, result) -> None:
        """Store a result. Rows that are not `mine`, bool[A, 1], keep what another unit stored; None: all are."""
        if mine is not None:
            result = jnp.where(mine, result, out[stack, plane].astype(jnp.float32))
        out[stack, plane] = result.astype(self.shape.dtype)

    def token_of_tile(self, unit):
        """The token of a unit with one query, counted from the first that its tile brings. Row r's is token r."""
        return self.units.row[unit] & (self.shape.tile_tokens - 1)


def _tokens(shape: Shape, query_tile) -> jax.Array:
    """int32[A, 1]: the packed token of each row of a query tile."""
    row = lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0)
    if shape.one_tile_per_row:
        later = ((row >= i * shape.group).astype(jnp.int32) for i in range(1, shape.tile_q))
        return query_tile * shape.tile_q + sum(later)
    return query_tile * shape.tile_q + (row & (shape.tile_q - 1))
