"""How long the TPU attention kernel takes for some rows: the bundles of its schedule, times how often each loop runs.

Loops are identified by what they do. Outermost loops that multiply process, in each iteration (a *turn*), the keys of
one fetch, in one or several tiles, for a tile of queries; outermost loops with DMAs write new keys and values, a chunk
at a time. Within a turn, loops with DMAs run once for each block. What a turn may skip runs once for each tile of
queries, as does the write of a row's only token; but loops that only move what lies in VMEM run once for the tokens
whose queries come at once. Pure arithmetic on `tpu_schedule.Loop`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.aot.tpu_schedule import Loop

CHUNK = 16  # slots written at once
FIRST_ROWS = 6  # whose only tokens are written before the first turn


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Equal rows. kv_len: of each, including its queries; tile_q, tile_kv: queries and keys at once; tile_tokens:
    tokens whose queries come at once; fetch_kv: keys of a turn.
    """

    count: int
    query_len: int
    kv_len: int
    tile_q: int
    tile_tokens: int
    tile_kv: int
    fetch_kv: int
    block_size: int

    @property
    def num_units(self) -> int:
        """Tiles of queries."""
        return self.count * -(-self.query_len // self.tile_q)

    @property
    def num_turns(self) -> int:
        """Turns of all tiles: a tile of queries sees the keys up to its last query."""
        before = self.kv_len - self.query_len
        ends = (
            min(first + self.tile_q, self.query_len)
            for first in range(0, self.query_len, self.tile_q)
        )
        return self.count * sum(-(-(before + end) // self.fetch_kv) for end in ends)

    @property
    def num_chunks(self) -> int:
        """Those written before the first turn."""
        if self.query_len == 1:
            return min(FIRST_ROWS, self.count)
        return self.count * -(-self.query_len // CHUNK)


def bundles(program: Loop, rows: Rows) -> float:
    """Bundles of one launch. One that writes nothing is for rows with one query among rows with several, of which there
    are none here.
    """
    if not any(_writes(loop) for loop in program.inner):
        return program.own
    total: float = program.own
    for loop in program.inner:
        if loop.multiplies:
            total += rows.num_turns * _turn(loop, rows) + rows.num_units * _unit(loop, rows)
        elif _writes(loop):
            total += rows.num_chunks * loop.bundles
    return total


def _writes(loop: Loop) -> bool:
    """Of an outermost loop."""
    return _moves(loop) and not loop.multiplies


def _moves(loop: Loop) -> bool:
    return loop.num_starts > 0 or loop.num_waits > 0


def _turn(loop: Loop, rows: Rows) -> int:
    blocks, tiles = rows.fetch_kv // rows.block_size, rows.fetch_kv // rows.tile_kv
    products = sum((each.trips or tiles) * each.usual for each in loop.inner if each.multiplies)
    moved = sum(each.bundles for each in loop.inner if _moves(each) and not each.multiplies)
    return loop.least + products + blocks * moved


def _unit(loop: Loop, rows: Rows) -> float:
    """Bundles that begin and end a tile of queries: what a turn may skip, including its loops. The one that divides by
    the sums of weights is a tile's.
    """
    total: float = loop.own - loop.least
    for each in loop.inner:
        if not _moves(each) and not each.multiplies:
            share = 1 if each.used("EUP") else rows.tile_q / rows.tile_tokens
            total += share * (each.trips or 0) * each.bundles
    return total
