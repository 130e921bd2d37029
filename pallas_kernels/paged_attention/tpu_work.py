"""What there is to do in a call of the TPU kernel, as lists in the scalar memory. Letters as in `tpu.py`.

`chunks` and `units` compute them in XLA, once for all layers; `Rows` and `Units` read them in the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.lists import expand
from pallas_kernels.paged_attention.tpu_shape import Shape, write_sizes

COMPARED = 8  # blocks at once, by `reads_others_writes`


def pack_table(table: jax.Array) -> jax.Array:
    """[R, M] → int32[R * ceil(M / 2)] of two ids each, the first in the low half: scalar memory is small."""
    table = jnp.pad(table, ((0, 0), (0, table.shape[1] % 2)))
    return (table[:, ::2] | (table[:, 1::2] << 16)).reshape(-1)


@dataclass(frozen=True)
class Rows:
    """What the scalar memory holds of the rows."""

    shape: Shape
    table: jax.Array  # int32[R * ceil(M / 2)], see `pack_table`
    kv_lens: jax.Array  # int32[R]
    query_starts: jax.Array  # int32[R+1]

    def block(self, row, number):
        """The row's block of that number."""
        word = self.table[row * self._words + (number >> 1)]
        return (word >> ((number & 1) << 4)) & 0xFFFF

    def block_of_fetch(self, row, fetch, number: int):
        """The same, of that number within a fetch: less to compute for the scalar unit."""
        blocks = self.shape.fetch_kv // self.shape.block_size
        if blocks % 2:
            return self.block(row, fetch * blocks + number)
        word = self.table[row * self._words + fetch * (blocks // 2) + number // 2]
        return word >> 16 & 0xFFFF if number % 2 else word & 0xFFFF

    @property
    def _words(self) -> int:
        return (self.shape.blocks_per_row + 1) // 2

    def queries(self, row):
        """The row's packed tokens [first, end), and the difference between a token's position and its index."""
        first, end = self.query_starts[row], self.query_starts[row + 1]
        return first, end, self.kv_lens[row] - end


def chunks(
    shape: Shape, kv_lens: jax.Array, query_lens: jax.Array, num_tokens: int
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Chunks that get new tokens: the row of each, its first position; and their number, int32[1]. The same for blocks,
    if they have scales.
    """
    most_rows = min(kv_lens.shape[0], num_tokens)  # that have tokens
    found = []
    for size in write_sizes(shape):
        first = (kv_lens - query_lens) // size
        counts = jnp.where(query_lens > 0, -(-kv_lens // size) - first, 0)
        row, number, total = expand(counts, num_tokens // size + 2 * most_rows)
        found.append((row, (first[row] + number) * size, total))
    return found


def reads_others_writes(shape: Shape, block_table: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """int32[1]: whether a row reads a block that another row writes in this call. Every row has one query, or none.

    The blocks that a row reads are full but for its last one, which only it writes. So only blocks that this call fills
    are looked for: few, so a loop over some at a time is cheaper than comparing all at once.
    """
    block_size, number = shape.block_size, jnp.arange(block_table.shape[1])[None]
    last = (-(-kv_lens // block_size) - 1)[:, None]
    read = jnp.where(number < last, block_table, 0)
    written = jnp.where(number == last, block_table, 0).sum(axis=1)
    # Block 0 is nobody's.
    is_full = (written > 0) & (kv_lens & (block_size - 1) == 0)
    written = -jnp.sort(-jnp.where(is_full, written, -1))
    written = jnp.pad(written, (0, -written.size % COMPARED), constant_values=-1)

    def compare(state):
        index, _ = state
        some = lax.dynamic_slice(written, (index,), (COMPARED,))
        return index + COMPARED, (read[None] == some[:, None, None]).any()

    def is_open(state):
        return (state[0] < is_full.sum()) & ~state[1]

    _, is_hit = lax.while_loop(is_open, compare, (jnp.int32(0), jnp.zeros((), bool)))
    return is_hit[None].astype(jnp.int32)


def units(
    shape: Shape,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    has_units: jax.Array,
    num_tokens: int,
    query_lens: jax.Array | None = None,
) -> list[jax.Array]:
    """Units of the rows that have some, in the order of doing them: the arrays of `Units`, and their number.

    has_units: bool[R]; such rows have queries. query_lens: the last so many tokens of each row are queries; None: all.
    """
    tokens = shape.tile_tokens
    begins = query_starts if query_lens is None else query_starts[1:] - query_lens
    first = begins[: kv_lens.shape[0]] // tokens
    counts = jnp.where(has_units, -(-query_starts[1:] // tokens) - first, 0)
    most_rows = min(kv_lens.shape[0], num_tokens)
    row, number, total = expand(counts, -(-num_tokens // tokens) + most_rows)
    tile = first[row] + number
    moved = jnp.concatenate([jnp.zeros(1, jnp.int32), (tile[1:] != tile[:-1]).astype(jnp.int32)])
    before = (kv_lens - query_starts[1:])[row]
    end_key = jnp.minimum(query_starts[row + 1], (tile + 1) * tokens) + before
    first_key = jnp.zeros_like(end_key)
    if (window := shape.mask[1]) is not None:
        position = jnp.maximum(begins[row], tile * tokens) + before
        first_key = jnp.maximum(position - window + 1, 0)
    return [row, tile, jnp.cumsum(moved, dtype=jnp.int32), first_key, end_key, total]


@dataclass(frozen=True)
class Units:
    """The units of `tpu_attend.py`, in the scalar memory, and what each reads."""

    rows: Rows
    row: jax.Array  # int32[..]
    query_tile: jax.Array  # int32[..]
    visit: jax.Array  # int32[..] query tiles that come before, which say what buffer it has
    first_key: jax.Array  # int32[..] position of the first key that its queries see
    end_key: jax.Array  # int32[..] and behind the last
    total: jax.Array  # int32

    def fetches(self, unit):
        """The numbers [first, end) of fetches of keys; at least one."""
        fetch_kv = self.rows.shape.fetch_kv
        bits = fetch_kv.bit_length() - 1  # a shift is one instruction, a quotient is several
        return self.first_key[unit] >> bits, (self.end_key[unit] + fetch_kv - 1) >> bits

    def keys_of_fetch(self, unit, fetch):
        """The keys [first, end) of one fetch, counted from its begin."""
        begin, fetch_kv = fetch * self.rows.shape.fetch_kv, self.rows.shape.fetch_kv
        first = jnp.maximum(self.first_key[unit] - begin, 0)
        return first, jnp.minimum(self.end_key[unit] - begin, fetch_kv)

    def following(self, unit, fetch):
        """The turn after that. There may be one beyond the last unit, which is nobody's."""
        most = self.row.shape[0] - 1
        is_last = fetch + 1 >= self.fetches(jnp.minimum(unit, most))[1]
        next_first = self.fetches(jnp.minimum(unit + 1, most))[0]
        return unit + is_last.astype(jnp.int32), jnp.where(is_last, next_first, fetch + 1)

    @property
    def _has_one_unit_per_tile(self) -> bool:
        return self.rows.shape.tile_tokens == 1 or self.rows.shape.one_tile_per_row

    def begins_visit(self, unit):
        if self._has_one_unit_per_tile:
            return True
        return (unit == 0) | (self.visit[unit] != self.visit[jnp.maximum(unit - 1, 0)])

    def ends_visit(self, unit):
        if self._has_one_unit_per_tile:
            return True
        after = jnp.minimum(unit + 1, self.row.shape[0] - 1)
        return (unit == self.total - 1) | (self.visit[unit] != self.visit[after])
