"""What a program of `gpu_prefill.py` works with: what is known before it runs, its shared memory, its tiles of queries,
and what of a tile is a warpgroup's.

Knows sizes and barriers; must not know what is computed. Letters as in `gpu.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_layout import QueryTiles, rows_of_tile
from pallas_kernels.paged_attention.gpu_tiles import Options, Source, Stages, stage_of
from pallas_kernels.wgmma import Ref, piece, store, swizzle_of, tiled

# Columns of queries and output that lie together: lines of 128 bytes. Mosaic GPU swizzles shared memory as it likes, by
# the number of each such line, which code that loads or stores a slice counts from where the slice begins.
STRIP = 64
# The columns where the strips of a piece begin, see `Plan.pieces`.
Piece = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known before a program runs."""

    options: Options
    source: Source
    head_dim: int
    num_kv_heads: int
    group: int
    # Queries of a tile, an even number: row g * tile_q + i of wgmma is head g of query i, and the rows left over go to
    # waste.
    tile_q: int
    last_token: int  # where a tile may begin
    num_programs: int
    in_parts: bool  # keys of a tile are cut, and sums of its parts are the output

    @property
    def plain(self) -> bool:
        """Stages are as wgmma reads them."""
        return self.source.format is None

    @property
    def by_columns(self) -> bool:
        """The two warpgroups share the columns of V, and not the rows, of which there are 64. See `gpu_prefill.py`."""
        return self.rows == 64

    @property
    def rows(self) -> int:
        """Of a query tile."""
        return rows_of_tile(self.head_dim)

    @property
    def columns(self) -> int:
        """Of V, that a warpgroup has."""
        return self.head_dim // 2 if self.by_columns else self.head_dim

    @property
    def early(self) -> bool:
        """There is room for the next tile's queries beside this one's output."""
        return self.plain and self.head_dim <= 128

    @property
    def pieces(self) -> list[Piece]:
        """What of queries and of output is copied at once, of D columns padded to a multiple of 64."""
        columns = pl.cdiv(self.head_dim, STRIP) * STRIP
        if self.by_columns:  # a strip of either warpgroup
            return [(first, first + columns // 2) for first in range(0, columns // 2, STRIP)]
        width = columns if columns <= 192 else 128  # or there is no room for two stages of V
        return [tuple(range(i, i + width, STRIP)) for i in range(0, columns, width)]

    def copies(self, piece: Piece) -> list[tuple[int, int, slice]]:
        """The copies of a piece, one for each head of the group and strip: the head, the strip and its columns."""
        strips = [(i, slice(first, first + STRIP)) for i, first in enumerate(piece)]
        return [(g, *strip) for g in range(self.group) for strip in strips]

    @property
    def tile_and_stages(self) -> tuple[int, int]:
        """Keys of a tile, stages of K as of V: what fits into shared memory beside queries and output."""
        sizes = self.options.sizes
        if self.by_columns:
            return 64, 1
        return (64, 2) if self.head_dim > 128 else (sizes.tile_kv, sizes.stages)

    @property
    def tile(self) -> int:
        return self.tile_and_stages[0]


def memory_of(plan: Plan, dtype) -> dict[str, Any]:
    """Types of the shared memory and barriers of a program, for `Memory.of`."""
    tile, num_stages = plan.tile_and_stages
    num_strips = len(plan.pieces[0])
    by_row = plgpu.SMEM((num_strips, plan.rows, STRIP), dtype)
    as_wgmma = partial(tiled, dtype=dtype, swizzle=swizzle_of(plan.head_dim * dtype.itemsize))
    interpreted = plan.options.interpret is not None
    readers = 2 if plan.plain else 1
    return {
        "output": by_row,
        "arrived": by_row if plan.early else None,
        "queries": as_wgmma(plan.rows, plan.head_dim),
        "weights": as_wgmma(128, tile) if interpreted else None,
        "wide": [] if plan.plain else [as_wgmma(tile, plan.head_dim)] * 2,
        "factors": plgpu.SMEM((2, 2, tile), jnp.float32) if plan.source.has_scales else None,
        "rings": [
            (
                plan.source.stages(num_stages, tile),
                plgpu.Barrier(num_arrivals=readers, num_barriers=num_stages),
            )
        ]
        * 2,
        "queries_ready": plgpu.Barrier(num_arrivals=plan.group * num_strips),
        **{
            name: plgpu.Barrier(num_arrivals=2)
            for name in ("queries_done", "in_turn", "met", "written")
        },
    }


@dataclass(frozen=True)
class Memory:
    """Shared memory and barriers of a program. Arrays are in q's dtype; `gpu_prefill.py` says who waits for what."""

    output: Ref  # [strips of a piece, rows, STRIP], row-major
    arrived: Ref  # likewise: queries as TMA copies them; `output` unless `plan.early`
    queries: Ref  # [rows, D], in wgmma's layout, like the next two
    weights: Ref | None  # [128, tile], only for the interpreter: see `as_operand`
    wide: Sequence[Ref]  # [tile, D] each: widened tiles of K and V; none if `plan.plain`
    factors: Ref | None  # float32[2, 2, tile]: their scales and zeros; None if the pool has none
    keys: Ring
    values: Ring
    queries_ready: Ref  # a copy for each head and strip
    queries_done: Ref  # 2 arrivals: both halves of `arrived` are read
    in_turn: Ref  # 2 arrivals, like the next two: half a step is over
    met: Ref
    written: Ref  # both halves of `output`

    @classmethod
    def of(cls, plan: Plan, *, rings, arrived, output, **others) -> Memory:
        num_stages = plan.tile_and_stages[1]
        keys, values = (Ring(num_stages, stages, done) for stages, done in rings)
        arrived = output if arrived is None else arrived
        return cls(output=output, arrived=arrived, keys=keys, values=values, **others)


@dataclass(frozen=True)
class Ring:
    """Stages of K or of V. Of all tiles that a program copies, number i stands in stage i % num."""

    num: int
    stages: Stages
    done: Ref  # a barrier per stage: no warpgroup reads it any more

    def stage(self, i):
        return stage_of(i, self.num)

    def tile(self, i):
        return self.stages.data.at[self.stage(i)]

    def wait(self, i):
        plgpu.barrier_wait(self.stages.ready.at[self.stage(i)])

    def release(self, i):
        plgpu.barrier_arrive(self.done.at[self.stage(i)])

    def wait_until_free(self, i):
        """For tile i; or until tile i - num is done."""
        pl.when(i >= self.num)(lambda: plgpu.barrier_wait(self.done.at[self.stage(i)]))


@dataclass(frozen=True)
class Share:
    """What of a tile is a warpgroup's of the two that compute."""

    plan: Plan
    warpgroup: jax.Array
    dtype: Any  # of queries

    @property
    def rows(self):
        """Of wgmma."""
        return pl.ds(0, 64) if self.plan.by_columns else piece(self.warpgroup, 64)

    @property
    def columns(self):
        """Of V, of queries and of output."""
        return self._columns(0, self.plan.columns)

    def _columns(self, first: int, number: int):
        """So many, from number `first` of its own on."""
        if not self.plan.by_columns:
            return slice(first, first + number)
        return pl.ds(pl.multiple_of(self.warpgroup * self.plan.columns + first, STRIP), number)

    def parts(self, strips: Piece) -> list[tuple]:
        """Of a piece, in as many columns as wgmma's tiles have: which of its own columns, where they are in `queries`,
        and in `arrived` and `output`; and the registers to copy them by way of.

        There a few threads have a whole line. As wgmma has them, 8 rows may meet in the same banks of `arrived` and
        `output`.
        """
        swizzle = swizzle_of(self.plan.head_dim * self.dtype.itemsize)
        width = swizzle // self.dtype.itemsize
        by_line: Any = plgpu.Layout.SMEM_GMEM_COPY((64, width), self.dtype, swizzle)
        of_either = [(self.warpgroup, strips[0])] if self.plan.by_columns else enumerate(strips)
        found = []
        for strip, of_strip in of_either:
            for first in range(of_strip, min(of_strip + STRIP, self.plan.head_dim), width):
                begin = first - of_strip
                place = (strip, self.rows, slice(begin, begin + width))
                part = (self.rows, self._columns(first, width))
                found.append((slice(first, first + width), part, place, by_line))
        return found


def put(smem, part, value) -> None:
    """Store a value. jax 0.12 finds no order without bank conflicts for lines shorter than 128 bytes."""
    if value.shape[1] * value.dtype.itemsize < 128:
        store(smem.at[part], value)
    else:
        smem[part] = value


@dataclass(frozen=True)
class Tile:
    """A tile of queries for one KV head, all numbers that the kernel computes."""

    row: jax.Array
    head: jax.Array
    token: jax.Array  # where `tile_q` queries are read
    skipped: jax.Array  # so many of them are not the tile's own,
    count: jax.Array  # so many are, and they begin at position
    bottom: jax.Array  # which is negative for padding
    begin: jax.Array  # positions from here
    end: jax.Array  # to here can be read: of the row, and by no window left behind
    first: jax.Array  # key tile that its own queries see
    num_keys: jax.Array  # tiles of keys

    @classmethod
    def of(cls, plan: Plan, tiles: QueryTiles, item, head) -> Tile:
        row, token, count = tiles.row[item], tiles.token[item], tiles.count[item]
        bottom, begin, end = tiles.position[item], tiles.begin[item], tiles.end[item]
        window, tile = plan.options.window, plan.tile
        # A tile that would end beyond the last token begins earlier, with queries that are not its own.
        start = jnp.minimum(token, plan.last_token)
        high = jnp.maximum(bottom + count, 0)
        low = jnp.int32(0) if window is None else jnp.maximum(bottom - (window - 1), 0)
        if tiles.low is not None:
            low, high = tiles.low[item], jnp.minimum(high, tiles.high[item])
        first = lax.div(low, jnp.int32(tile))
        num_keys = jnp.where(low < high, lax.div(high + (tile - 1), jnp.int32(tile)) - first, 0)
        return cls(row, head, start, token - start, count, bottom, begin, end, first, num_keys)

    def unmasked(self, plan: Plan):
        """From which of its key tiles on, and up to which, its own queries all see every key."""
        window, tile = plan.options.window, plan.tile
        whole = lax.div(jnp.maximum(self.bottom + 1, 0), jnp.int32(tile))
        edge = jnp.int32(0)
        if window is not None:
            top = self.bottom + self.count - 1
            edge = lax.div(jnp.maximum(top - window + 1, 0) + (tile - 1), jnp.int32(tile))
        edge = jnp.clip(edge - self.first, 0, self.num_keys)
        return edge, jnp.clip(whole - self.first, edge, self.num_keys)
