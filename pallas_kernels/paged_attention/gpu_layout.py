"""What surrounds the paged attention kernels of `gpu.py`: what they cannot do, sizes, and lists of what there is to do.

Plain jnp, which XLA computes once for all layers. Knows nothing of copies, barriers and products. Letters as in
`gpu.py`: T packed query tokens, R rows, M blocks per row, N blocks, S block size, H query heads, K KV heads, D head
dim, G = H / K query heads per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart, whole
from pallas_kernels.kv_write.quantized import QuantizedPool
from pallas_kernels.kv_write.storage import Pool
from pallas_kernels.lists import expand

# Rows with one query: with so many groups of keys times KV heads, nine tenths of an H200's SMs, programs take whole
# groups, otherwise parts of them. No result depends on it.
ENOUGH_GROUPS = 118
MOST_KEYS = 65_536  # of a row with one query whose parts are the shortest
# The keys of a row with few queries are cut into parts of at least CUT_KEYS, as long as the row has at most CUT_ITEMS
# (tiles of queries, times KV heads, times parts). Sums are cut there too.
CUT_ITEMS, CUT_KEYS = 128, 1024
PARTS_BYTES = 256 << 20  # of those sums at once; rows that have more take turns
SM_BYTES = 228 * 1024  # of shared memory, that an SM has for its programs,
RESERVED_BYTES = 1024  # and each takes besides what it asks for
HEAD_DIMS = (64, 96, 128, 192, 256, 512)
MOST_BY_ROWS = 256  # columns of sums that a warpgroup has room for in registers
MOST_TILE_KV = 128  # a tile lies in one block, or consists of whole ones
# Of latents: their columns, those of values, and query heads. The sums of 24 heads leave too few registers.
MOST_WIDTH, MOST_VALUES, MOST_LATENT_HEADS = 576, 512, 16


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may differ from one kind of device to another (`tune.py`), but not within an engine.

    tile_kv: keys that a tile of queries meets at once, up to head dim 128; stages: such tiles under way or in use, of
    K as of V; programs_per_sm: the most that share an SM where rows have one query.
    """

    tile_kv: int = 128
    stages: int = 2
    programs_per_sm: int = 3


def unsupported_reason(
    q: jax.Array | jax.ShapeDtypeStruct, pool: Pool | PoolPart | LatentPool
) -> str | None:
    """Why these kernels cannot serve such arguments, in one line; None if they can. Shapes and dtypes suffice."""
    if reason := unsupported_jax():
        return reason
    array = whole(pool)
    quantised = isinstance(array, QuantizedPool)
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not (quantised or array.dtype == q.dtype):
        other = "" if quantised else f" and the pool {array.dtype}"
        return f"q is {q.dtype}{other}; they must be bfloat16 or float16, and the same"
    if pool.shape[1] not in (8, 16, 32, 64) and pool.shape[1] % MOST_TILE_KV:
        return (
            f"block size {pool.shape[1]} is neither 8, 16, 32, 64 nor a multiple of {MOST_TILE_KV}"
        )
    if isinstance(pool, LatentPool):
        return _unsupported_latents(q.shape[1], pool)
    if q.shape[2] not in HEAD_DIMS:
        return f"head dim {q.shape[2]} is none of {HEAD_DIMS}"
    group = q.shape[1] // (pool.shape[2] // 2)
    most = rows_of_tile(q.shape[2]) // 2  # a tile has at least two queries
    if group > most:
        return f"{group} query heads per KV head are more than {most}"
    if quantised and isinstance(pool, PoolPart):
        return f"layers differ in their KV heads, and the pool is {array.format}"
    if isinstance(pool, QuantizedPool):
        # Each half of a byte is stored as columns of its own, in tiles of 64.
        tile = 64 if pool.format == "int4" else 32
        if q.shape[2] >= 256 or pool.data.shape[3] % tile:
            return f"head dim {q.shape[2]} in {pool.format} does not fit wgmma's tiles or memory"
        if pool.scale_zero is not None and pool.shape[2] % 4:
            return f"{pool.shape[2] // 2} KV heads are odd: the scales of two are copied at once"
    return None


def _unsupported_latents(num_heads: int, pool: LatentPool) -> str | None:
    width, value_dim = pool.shape[3], pool.value_dim
    if isinstance(pool.pool, QuantizedPool):
        return f"latents are {pool.pool.format}, and the kernel reads those of bfloat16 or float16"
    if width % 64 or width > MOST_WIDTH:
        return f"latents of {width} columns are no multiple of 64 up to {MOST_WIDTH}"
    if value_dim % 128 or value_dim > min(width, MOST_VALUES):
        return (
            f"values of {value_dim} columns, of latents of {width}, are no multiple of 128 up to "
            f"{MOST_VALUES}"
        )
    if num_heads > MOST_LATENT_HEADS:
        return (
            f"{num_heads} query heads that read one latent are more than {MOST_LATENT_HEADS}; raise "
            "tensor_parallel_size"
        )
    return None


def rows_of_tile(head_dim: int) -> int:
    """Of a tile of queries: two warpgroups have 64 each, or the same 64 and half the columns of V."""
    return 128 if head_dim <= MOST_BY_ROWS else 64


def rows_at_once(num_rows: int, bytes_per_row: int) -> int:
    """Rows whose parts fit into PARTS_BYTES, in turns of equally many."""
    most = max(1, PARTS_BYTES // bytes_per_row)
    return -(-num_rows // -(-num_rows // most))


@dataclass(frozen=True, kw_only=True)
class Division:
    """How the keys of a row with one query are divided: into parts, and `parts` of these are a group.

    The sums of a group's parts are added up in their order, and then those of the groups. So a program that takes a
    whole group adds up what others would leave to `gpu_combine.py`. Never tuned, since sums are cut there.
    """

    # Of a part. Without a window, rows of more than MOST_KEYS keys have twice as many, of more than twice that four
    # times as many, ...
    keys: int
    parts: int  # of a group

    @classmethod
    def of(cls, rows: int, columns: int) -> Division:
        """For the sums of so many rows and columns: a second one in registers only where both are small."""
        small = rows * columns <= 4096
        return cls(keys=256, parts=8) if small else cls(keys=512, parts=1)

    def most_groups(self, num_keys: int, window: int | None) -> int:
        """The most groups with a seen key, of a row of up to `num_keys` keys of which the last `window` are seen."""
        return _most_items(self.keys * self.parts, num_keys, window)

    def most_items(
        self, num_rows: int, num_kv_heads: int, num_keys: int, window: int | None
    ) -> int:
        """The most items that so many rows have."""
        groups = num_rows * self.most_groups(num_keys, window)
        if self.parts == 1:
            return groups
        few = num_rows + self.parts * ((ENOUGH_GROUPS - 1) // num_kv_heads)
        return max(groups, min(num_rows * _most_items(self.keys, num_keys, window), few))


def _most_items(size: int, num_keys: int, window: int | None) -> int:
    if window is None:
        return min(-(-num_keys // size), MOST_KEYS // size)
    return min(-(-num_keys // size), -(-(window - 1) // size) + 1)


class Items(NamedTuple):
    """What rows with one query have to read: parts of their keys, or groups. Arrays, or in a kernel refs: int32 each.

    What lies behind a window is no item.
    """

    starts: Any  # [R + 1]: row r's items are those from starts[r] to before starts[r + 1]
    in_first_group: Any  # [R]: of these, so many are of the row's first group,
    in_group: Any  # [1]: and so many of each other
    row: Any  # [items], like all below
    low: Any  # positions of the row that its query sees, from here
    high: Any  # to before here
    keys: Any  # of a part


def items_of(
    kv_lens: Int[Array, " R"],
    wanted: Bool[Array, " R"],
    division: Division,
    num_kv_heads: int,
    num_keys: int,
    window: int | None,
) -> Items:
    """num_keys: the most that a row can have. A row without keys has an item, with nothing to read, if it is wanted."""
    num_rows, lowest = kv_lens.shape[0], jnp.zeros_like(kv_lens)
    keys, limit = jnp.full_like(kv_lens, division.keys), MOST_KEYS
    if window is not None:
        lowest = jnp.maximum(kv_lens - window, 0)
    while window is None and limit < num_keys:
        keys, limit = jnp.where(kv_lens > limit, 2 * keys, keys), 2 * limit
    size, in_group = division.parts * keys, jnp.int32(1)
    if division.parts > 1:
        num_groups = jnp.sum(-(-kv_lens // size) - lowest // size)
        are_few = num_groups * num_kv_heads < ENOUGH_GROUPS
        size = jnp.where(are_few, keys, size)
        in_group = jnp.where(are_few, division.parts, 1)
    first = lowest // size
    counts = jnp.maximum(-(-kv_lens // size) - first, wanted.astype(jnp.int32))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    most = division.most_items(num_rows, num_kv_heads, num_keys, window)
    row, number, _ = expand(counts, most)
    begin = (number + first[row]) * size[row]
    lists = (
        starts,
        in_group - first % in_group,
        in_group[None],
        row,
        jnp.maximum(begin, lowest[row]),
        jnp.minimum(begin + size[row], kv_lens[row]),
        keys[row],
    )
    return Items(*(x.astype(jnp.int32) for x in lists))


class QueryTiles(NamedTuple):
    """Tiles of the queries of rows with several, those with most keys first. Arrays, or in a kernel refs: int32 each.

    Rows with one query have none. The tokens of padding are a row without keys.
    """

    number: Any  # [1]: so many of the following are tiles
    row: Any  # [tiles], like all below
    token: Any  # the first query
    count: Any  # queries
    position: Any  # of the first query in its row; negative for padding
    begin: Any  # positions of the row that one of the row's queries sees, from here
    end: Any  # to before here
    low: Any = None  # of a tile whose keys are cut: its part begins here, at a multiple of 128,
    high: Any = None  # and ends before here


def query_tiles(
    query_starts: Int[Array, " R+1"],
    kv_lens: Int[Array, " R"],
    num_tokens: int,
    tile_q: int,
    window: int | None,
    cut: Bool[Array, " R"] | None = None,
) -> QueryTiles:
    """`tile_q`: the most queries of a tile. Rows that are `cut` have none here."""
    num_rows = kv_lens.shape[0]
    lens = query_starts[1:] - query_starts[:-1]
    padding = jnp.maximum(num_tokens - query_starts[-1:], 0)
    elsewhere = lens == 1 if cut is None else (lens == 1) | cut
    lens = jnp.append(jnp.where(elsewhere, 0, lens), padding).astype(jnp.int32)
    most = num_tokens // tile_q + num_rows + 1
    row, number, total = expand(-(-lens // tile_q), most)
    first = number * tile_q
    count = jnp.minimum(lens[row] - first, tile_q)
    ends_at = jnp.append(kv_lens, 0)[row]
    oldest = ends_at - lens[row]
    position = jnp.where(row < num_rows, oldest + first, -num_tokens)
    begin, num_keys = jnp.zeros_like(row), jnp.maximum(position + count, 0)
    if window is not None:
        begin = jnp.maximum(oldest - (window - 1), 0)
        num_keys = jnp.minimum(num_keys, window + count)
    order = jnp.argsort(jnp.where(jnp.arange(most) < total, -num_keys, 1), stable=True)
    token = query_starts[row].astype(jnp.int32) + first
    lists = (row, token, count, position, begin, ends_at)
    return QueryTiles(total, *(x[order].astype(jnp.int32) for x in lists))


@dataclass(frozen=True)
class Cuts:
    """How the keys of rows with few queries and long contexts are cut, so that a few tiles keep all SMs busy."""

    tile_q: int
    num_kv_heads: int
    num_tokens: int
    max_rows: int  # that may be cut,
    max_tiles: int  # a row's tiles of queries,
    max_parts: int  # and a tile's parts

    @classmethod
    def of(
        cls,
        num_rows: int,
        num_tokens: int,
        num_keys: int,
        tile_q: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
    ) -> Cuts | None:
        """`num_keys`: the most that a row can have. None if no row is ever cut: windows leave long contexts behind."""
        items = CUT_ITEMS // num_kv_heads
        parts, tiles = min(items, num_keys // CUT_KEYS), min(items // 2, -(-num_tokens // tile_q))
        if window is not None or head_dim % 64 or parts < 2 or tiles < 1 or num_tokens < 2:
            return None
        rows = min(num_rows, num_tokens // 2)
        return cls(tile_q, num_kv_heads, num_tokens, rows, tiles, parts)

    def tiles_of(self, num_rows: int) -> int:
        """The most tiles that so many rows have."""
        return min(num_rows * self.max_tiles, self.num_tokens // self.tile_q + num_rows)

    def items_of(self, num_rows: int) -> int:
        """The most parts of tiles that so many rows have."""
        of_row = min(CUT_ITEMS // self.num_kv_heads, self.max_tiles * self.max_parts)
        return min(num_rows * of_row, self.tiles_of(num_rows) * self.max_parts)

    def rows_at_once(self, item_bytes: int) -> int:
        """Rows whose parts fit into PARTS_BYTES, if `max_rows` are taken in turns of equally many."""
        if self.items_of(self.max_rows) * item_bytes <= PARTS_BYTES:
            return self.max_rows
        return rows_at_once(self.max_rows, self.items_of(1) * item_bytes)

    def parts(self, query_lens: Int[Array, " R"], kv_lens: Int[Array, " R"]) -> Int[Array, " R"]:
        """How many parts each tile of a row has, which depends on the row alone; 0 if it is not cut."""
        items = jnp.maximum(-(-query_lens // self.tile_q), 1) * self.num_kv_heads
        parts = jnp.minimum(CUT_ITEMS // items, kv_lens // CUT_KEYS)
        return jnp.where((query_lens > 1) & (parts > 1), parts, 0)


class CutTiles(NamedTuple):
    """The tiles of some rows that are cut, and their parts."""

    number: Int[Array, " 1"]  # of tiles
    # [tiles + 1]: tile i's parts are those from starts[i] to before starts[i + 1]
    starts: Int[Array, " tiles+1"]
    token: Int[Array, " tiles"]  # a tile's first query
    count: Int[Array, " tiles"]  # its queries; 0 beyond `number`
    parts: QueryTiles


def cut_tiles(
    cuts: Cuts,
    row: Int[Array, " r"],
    parts: Int[Array, " R"],
    query_starts: Int[Array, " R+1"],
    kv_lens: Int[Array, " R"],
) -> CutTiles:
    """The cut tiles of the rows `row`; an entry R stands for no row."""
    lens, kv_lens, token, parts = (
        x.at[row].get(mode="fill", fill_value=0)
        for x in (query_starts[1:] - query_starts[:-1], kv_lens, query_starts[:-1], parts)
    )
    lens = jnp.where(parts > 0, lens, 0)
    most = cuts.tiles_of(row.shape[0])
    i, tile, num_tiles = expand(-(-lens // cuts.tile_q), most)
    first, is_tile = tile * cuts.tile_q, jnp.arange(most) < num_tiles
    count = jnp.where(is_tile, jnp.minimum(lens[i] - first, cuts.tile_q), 0)
    num_parts = jnp.where(is_tile, parts[i], 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_parts, dtype=jnp.int32)])
    j, part, total = expand(num_parts, cuts.items_of(row.shape[0]))
    num_keys = kv_lens[i[j]]
    size = -(-num_keys // jnp.maximum(num_parts[j] * 128, 1)) * 128
    low = part * size
    position = num_keys - lens[i[j]] + first[j]
    first_token = token[i] + first
    lists = (
        row[i[j]],
        first_token[j],
        count[j],
        position,
        jnp.zeros_like(low),
        num_keys,
        low,
        low + size,
    )
    return CutTiles(
        num_tiles,
        starts,
        first_token.astype(jnp.int32),
        count.astype(jnp.int32),
        QueryTiles(total, *(x.astype(jnp.int32) for x in lists)),
    )
